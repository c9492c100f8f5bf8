// The source's HeaderChannel over its control links. Private to WeightSender's files.
#pragma once

#include <vector>

#include "sync/weight_sender.h"

namespace fastsync {

class WeightSender::Headers final : public HeaderChannel {
 public:
  explicit Headers(WeightSender& sender) : sender_(sender) {}
  void send(const BucketHeader& header) override {
    const std::vector<std::byte> payload = encode(header);
    for (auto& [rank, peer] : sender_.peers_) {
      if (peer.link && !peer.follows) peer.link->send(FrameType::kBucket, sender_.sync_, header.index, payload);
    }
  }
  BucketHeader receive(Wait& /*wait*/) override { throw InternalError("the source receives no bucket headers"); }
  bool try_receive(BucketHeader& /*header*/) override { return false; }
  void report_released(std::uint64_t /*count*/) override {}

  void wait_released(std::uint64_t count, Wait& wait) override {
    const auto behind = [&] {
      for (const auto& [rank, peer] : sender_.peers_) {
        if (peer.released < count) return true;
      }
      return false;
    };
    while (behind()) {
      sender_.pump();
      if (!behind()) break;
      wait.check();
      if (wait.expired()) sender_.time_out(sender_.slowest(), "take its buckets");
      std::vector<Link*> links;
      for (auto& [rank, peer] : sender_.peers_) {
        if (peer.link && !peer.parked) links.push_back(peer.link.get());
      }
      wait_readable(links, -1, wait.slice());
    }
    wait.progress();
  }

  // Among those that released the fewest, the one that has been silent the longest.
  [[nodiscard]] int slowest_receiver() const noexcept override {
    const Peer* slowest = nullptr;
    for (const auto& [rank, peer] : sender_.peers_) {
      if (slowest == nullptr || peer.released < slowest->released ||
          (peer.released == slowest->released && peer.heard < slowest->heard)) {
        slowest = &peer;
      }
    }
    return slowest == nullptr ? -1 : slowest->rank;
  }

 private:
  WeightSender& sender_;
};

}  // namespace fastsync

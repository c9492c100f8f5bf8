// How the ring of a device's leader gets to the leader's followers: memory and descriptors can be passed only between
// the processes themselves, and the source may be on another host.
//
//   leader    RingHost: listens at a door, whose name travels to the followers by way of the source
//   follower  RingGuest: connects, says who it is (Hello), gets the ring (Descriptors), answers with its events (Ready)
//
// The connection then stays for as long as both hold the ring. Its end says that the other side has closed all that it
// had opened, and so what was exported to it may go: that is how each side knows, and no message is needed. What becomes of
// a sync is never read from it; the source says that. A side whose device is broken can close nothing, and keeps the
// connection until its process ends.
//
// Ownership: the host shares the ring; a guest's ring is its caller's. Threads: one at a time. Nothing here blocks.
// Errors: CommError for a peer that is not one of ours, DeviceError from opening events.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/ipc/ipc_communicator.h"
#include "control/link.h"

namespace fastsync {

class RingHost {
 public:
  // `ring`: made for these followers, in their order. `token`: the group's secret.
  RingHost(std::shared_ptr<IpcCommunicator> ring, std::vector<int> followers, std::string token);
  ~RingHost() { retire(); }
  RingHost(const RingHost&) = delete;
  RingHost& operator=(const RingHost&) = delete;

  [[nodiscard]] const std::string& door() const noexcept { return door_; }
  [[nodiscard]] const std::shared_ptr<IpcCommunicator>& ring() const noexcept { return ring_; }
  // Serves whoever has come. Strangers are turned away without a word.
  void pump();
  // The followers that have not opened the ring yet.
  [[nodiscard]] std::vector<int> absent() const;
  // For waits: what to look at. No more than these once everybody is there.
  [[nodiscard]] int listener() const noexcept { return listener_.get(); }
  void append_links(std::vector<Link*>& links) const;
  // Closes what the followers exported, and keeps the ring until they have closed it, too. Idempotent.
  void retire() noexcept;

 private:
  struct Guest {
    std::unique_ptr<Link> link;
    std::optional<std::uint32_t> index;  // known: it has been given the ring
    bool opened = false;                 // and has opened it
  };
  // False: not one of ours, or gone.
  bool serve(Guest& guest);

  pid_t pid_;
  std::shared_ptr<IpcCommunicator> ring_;
  std::vector<int> followers_;
  std::string token_;
  OwnedFd listener_;
  std::string door_;
  std::vector<Guest> guests_;
};

class RingGuest {
 public:
  struct Offer {
    IpcDescriptor ring;
    std::vector<OwnedFd> descriptors;  // of the handshake
    std::uint32_t index = 0;
  };
  RingGuest(std::string door, int leader, Hello hello);
  ~RingGuest() { retire(nullptr); }
  RingGuest(const RingGuest&) = delete;
  RingGuest& operator=(const RingGuest&) = delete;

  // Connects where that is still to do, and reads. A leader that is not there (any more) is no error here: the source
  // knows what became of it.
  void pump();
  [[nodiscard]] bool has_offer() const noexcept { return offer_.has_value(); }
  [[nodiscard]] Offer take_offer();
  // The ring is open: its events, for the leader.
  void answer(const std::vector<EventHandle>& events);
  [[nodiscard]] Link* link() const noexcept { return link_.get(); }
  // Closes the ring (`reader`, may be null), says so, and keeps the reader's events until the leader has closed them.
  void retire(std::shared_ptr<IpcCommunicator> reader) noexcept;

 private:
  pid_t pid_;
  std::string door_;
  int leader_;
  Hello hello_;
  std::unique_ptr<Link> link_;
  std::optional<Offer> offer_;
};

}  // namespace fastsync

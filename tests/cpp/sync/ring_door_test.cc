// How a leader's ring gets to its followers, and who does not get it.
#include "sync/ring_door.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>

#include "common/error.h"
#include "support/bounds.h"
#include "support/expect_words.h"
#include "support/shared_device.h"
#include "sync/fanout_seat.h"

namespace fastsync::testing {
namespace {

constexpr std::uint32_t kBuffers = 2;
constexpr std::uint64_t kBucketBytes = 1024;
const std::string kToken = "the group's token";

Hello hello_of(int rank, const std::string& token = kToken) {
  Hello hello;
  hello.rank = static_cast<std::uint32_t>(rank);
  hello.token = token;
  return hello;
}

class RingDoor : public ::testing::Test {
 protected:
  RingDoor()
      : device_(SharedDevice::create(1)),
        host_(std::make_unique<RingHost>(IpcCommunicator::create(device_, kBuffers, kBucketBytes, {5, 7}, 2),
                                         std::vector<int>{5, 7}, kToken)) {}
  [[nodiscard]] std::unique_ptr<RingGuest> guest(int rank, const std::string& token = kToken) {
    return std::make_unique<RingGuest>(host_->door(), 2, hello_of(rank, token));
  }
  // Both sides look until `done`, or for as long as nothing that comes takes.
  template <typename Done>
  bool pump_until(RingGuest& guest, Done done, std::chrono::milliseconds patience = kLongTimeout) {
    const auto end = Clock::now() + patience;
    while (!done()) {
      if (Clock::now() > end) return false;
      guest.pump();
      host_->pump();
    }
    return true;
  }
  [[nodiscard]] std::unique_ptr<IpcCommunicator> open(RingGuest& guest) {
    EXPECT_TRUE(pump_until(guest, [&] { return guest.has_offer(); }));
    RingGuest::Offer offer = guest.take_offer();
    auto reader = IpcCommunicator::attach(device_, std::move(offer.ring), offer.descriptors[0].get(),
                                          offer.descriptors[1].get(), offer.index);
    guest.answer(reader->reader_events());
    return reader;
  }

  std::shared_ptr<SharedDevice> device_;
  std::unique_ptr<RingHost> host_;
};

TEST_F(RingDoor, FollowersOpenTheRingAndItsDoorCloses) {
  auto five = guest(5);
  auto seven = guest(7);
  const auto a = open(*five);
  ASSERT_TRUE(pump_until(*five, [&] { return host_->absent() == std::vector<int>{7}; }));
  const auto b = open(*seven);
  ASSERT_TRUE(pump_until(*seven, [&] { return host_->absent().empty(); }));
  EXPECT_EQ(host_->listener(), -1);
  EXPECT_EQ(a->bucket_bytes(), kBucketBytes);

  // A bucket goes through.
  Stream stream(device_, "test");
  for (IpcCommunicator* comm : {a.get(), b.get(), host_->ring().get()}) {
    comm->bind_stream(stream.view());
    comm->reset(1);
  }
  Wait wait(kLongTimeout, nullptr);
  const BucketSlot slot = host_->ring()->acquire(wait);
  BucketHeader sent;
  sent.used_bytes = 3;
  host_->ring()->send(slot, sent, wait);
  for (IpcCommunicator* comm : {a.get(), b.get()}) {
    BucketHeader header;
    comm->release(comm->receive(header, wait));
    EXPECT_EQ(header.used_bytes, 3U);
  }
  host_->ring()->flush(wait);
}

TEST_F(RingDoor, StrangersGetNothing) {
  for (auto& stranger : {guest(5, "another token"), guest(6), guest(2)}) {
    EXPECT_FALSE(pump_until(*stranger, [&] { return stranger->has_offer(); }, std::chrono::milliseconds(50)));
  }
  auto five = guest(5);
  EXPECT_NE(open(*five), nullptr);
}

TEST_F(RingDoor, ASecondClaimOfARankGetsNothing) {
  auto five = guest(5);
  const auto reader = open(*five);
  auto again = guest(5);
  EXPECT_FALSE(pump_until(*again, [&] { return again->has_offer(); }, std::chrono::milliseconds(50)));
}

TEST_F(RingDoor, ALeaderThatIsGoneIsNoErrorOfItsFollower) {
  auto five = guest(5);
  host_.reset();
  five->pump();
  EXPECT_FALSE(five->has_offer());
}

TEST_F(RingDoor, TheRingIsKeptUntilItsFollowersHaveClosedIt) {
  auto five = guest(5);
  std::shared_ptr<IpcCommunicator> reader = open(*five);
  ASSERT_TRUE(pump_until(*five, [&] { return host_->absent() == std::vector<int>{7}; }));
  host_->retire();
  EXPECT_EQ(device_->live_allocations, 1) << "the follower still has it open";
  five->retire(std::move(reader));
  EXPECT_EQ(device_->live_imports, 0);
  // Looked after when the next one is made.
  host_ = std::make_unique<RingHost>(IpcCommunicator::create(device_, kBuffers, kBucketBytes, {5}, 2),
                                     std::vector<int>{5}, kToken);
  EXPECT_EQ(device_->live_allocations, 1);
  host_->retire();
  EXPECT_EQ(device_->live_allocations, 0);
  EXPECT_EQ(device_->live_events, 0);
}

TEST(FanoutSeat, ComesBackAsItWasSent) {
  FanoutSeat leader;
  leader.role = FanoutSeat::Role::kLeader;
  leader.nccl_rank = 3;
  leader.nccl_ranks = 5;
  leader.nccl_id.internal[127] = 'x';
  leader.followers = {4, 9};
  const FanoutSeat led = FanoutSeat::decode(leader.encode());
  EXPECT_EQ(led.role, leader.role);
  EXPECT_EQ(led.nccl_rank, 3U);
  EXPECT_EQ(led.nccl_ranks, 5U);
  EXPECT_EQ(led.nccl_id.internal[127], 'x');
  EXPECT_EQ(led.followers, leader.followers);

  FanoutSeat beside;
  beside.role = FanoutSeat::Role::kBeside;
  beside.ring = {std::byte{1}, std::byte{2}};
  EXPECT_EQ(FanoutSeat::decode(beside.encode()).ring, beside.ring);

  FanoutSeat behind;
  behind.role = FanoutSeat::Role::kBehind;
  behind.leader = 9;
  behind.door = "a name";
  const FanoutSeat follower = FanoutSeat::decode(behind.encode());
  EXPECT_EQ(follower.leader, 9);
  EXPECT_EQ(follower.door, "a name");
}

TEST(FanoutSeat, BytesThatNoSourceSendsAreRefused) {
  FanoutSeat leader;
  leader.nccl_rank = 1;
  leader.nccl_ranks = 2;
  leader.followers = {4};
  const auto whole = leader.encode();
  for (std::size_t n = 0; n < whole.size(); ++n) {
    EXPECT_THROW((void)FanoutSeat::decode(std::span(whole).first(n)), CommError) << n;
  }
  auto longer = whole;
  longer.push_back(std::byte{0});
  EXPECT_THROW((void)FanoutSeat::decode(longer), CommError);
  auto unknown = whole;
  unknown[0] = std::byte{9};
  EXPECT_THROW((void)FanoutSeat::decode(unknown), CommError);
  leader.nccl_rank = 0;  // the source's own
  EXPECT_THROW((void)FanoutSeat::decode(leader.encode()), CommError);
  leader.nccl_rank = 2;
  EXPECT_THROW((void)FanoutSeat::decode(leader.encode()), CommError);
}

}  // namespace
}  // namespace fastsync::testing

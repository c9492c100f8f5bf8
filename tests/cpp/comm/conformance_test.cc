// What every communicator promises (comm/communicator.h), run over every backend with one to three receivers.
#include <gtest/gtest.h>

#include <stdexcept>

#include "rank_group.h"

namespace fastsync::testing {
namespace {

struct Backend {
  std::string name;
  std::unique_ptr<RankGroup> (*make)(std::uint32_t buffers, std::uint64_t bucket_bytes, int receivers);
};
template <typename Group>
std::unique_ptr<RankGroup> make_group(std::uint32_t buffers, std::uint64_t bucket_bytes, int receivers) {
  return std::make_unique<Group>(buffers, bucket_bytes, receivers);
}

constexpr std::uint64_t kBucketBytes = 8192 + 256;

class CommunicatorTest : public ::testing::TestWithParam<std::tuple<Backend, int>> {
 protected:
  [[nodiscard]] int receivers() const { return std::get<1>(GetParam()); }
  void make(std::uint32_t buffers, std::uint64_t bucket_bytes = kBucketBytes) {
    group_ = std::get<0>(GetParam()).make(buffers, bucket_bytes, receivers());
    group_->reset_all(1, receivers());
  }
  [[nodiscard]] Communicator& source() { return group_->source(); }
  [[nodiscard]] Communicator& receiver(int index) { return group_->receiver(index); }

  // One whole sync, every rank in a thread of its own.
  void expect_sync_works(std::uint64_t epoch, std::uint64_t buckets) {
    std::vector<std::future<void>> ranks;
    for (int i = 0; i < receivers(); ++i) {
      ranks.push_back(start_rank([this, i, epoch, buckets] {
        Wait wait(kLongTimeout, nullptr);
        receive_all(receiver(i), epoch, buckets, wait);
      }));
    }
    Wait wait(kLongTimeout, nullptr);
    EXPECT_NO_THROW(send_all(source(), epoch, buckets, wait));
    for (auto& rank : ranks) EXPECT_NO_THROW(rank.get());
  }

  // After a failure, as the session does it: all ranks drain, then begin the next epoch.
  void recover(std::uint64_t epoch) {
    std::vector<std::future<void>> ranks;
    for (int i = 0; i < receivers(); ++i) {
      ranks.push_back(start_rank([this, i] {
        Wait wait(kLongTimeout, nullptr);
        receiver(i).drain(wait);
      }));
    }
    Wait wait(kLongTimeout, nullptr);
    EXPECT_NO_THROW(source().drain(wait));
    for (auto& rank : ranks) EXPECT_NO_THROW(rank.get());
    group_->reset_all(epoch, receivers());
  }

  std::unique_ptr<RankGroup> group_;
};

TEST_P(CommunicatorTest, DeliversEveryBucketInOrderWithItsBytesAndHeader) {
  for (const std::uint32_t buffers : {1U, 2U, 3U}) {
    SCOPED_TRACE(buffers);
    make(buffers);
    expect_sync_works(1, 60);
  }
}

TEST_P(CommunicatorTest, ReusesItsBucketsForAThousandBuckets) {
  make(2, 512);
  expect_sync_works(1, 1000);
}

TEST_P(CommunicatorTest, RunsSyncAfterSyncOnTheSameMemory) {
  make(2);
  EXPECT_EQ(source().staging_bytes(), receiver(0).staging_bytes());
  const std::uint64_t staging = source().staging_bytes();
  EXPECT_LE(staging, 2 * kBucketBytes + 2 * 4096);
  for (std::uint64_t epoch = 1; epoch <= 20; ++epoch) {
    if (epoch > 1) group_->reset_all(epoch, receivers());
    expect_sync_works(epoch, epoch % 7);
  }
  EXPECT_EQ(source().staging_bytes(), staging);
}

TEST_P(CommunicatorTest, LetsAReceiverHoldEveryBucketAtOnce) {
  make(3);
  Wait wait(kLongTimeout, nullptr);
  auto sending = start_rank([this] {
    Wait own(kLongTimeout, nullptr);
    for (std::uint64_t i = 0; i < 3; ++i) send_one(source(), 1, i, own);
  });
  for (int r = 0; r < receivers(); ++r) {
    std::vector<BucketSlot> held;
    for (std::uint64_t i = 0; i < 3; ++i) held.push_back(receive_one(receiver(r), 1, i, wait));
    for (std::uint64_t i = 0; i < 3; ++i) {
      EXPECT_TRUE(holds_pattern(held[i].data, used_bytes_of(i, kBucketBytes), 1, i));
    }
    BucketHeader header;
    EXPECT_THROW((void)receiver(r).receive(header, wait), StateError);
    for (const BucketSlot& slot : held) receiver(r).release(slot);
  }
  EXPECT_NO_THROW(sending.get());
}

TEST_P(CommunicatorTest, SlowReceiverBoundsTheSourceAndIsNamed) {
  constexpr std::uint32_t kBuffers = 2;
  make(kBuffers);
  const int slow = receivers() - 1;
  std::atomic<bool> over{false};
  const auto stop_when_over = [&over] {
    if (over) throw std::runtime_error("over");
  };
  std::vector<std::future<void>> ranks;
  for (int i = 0; i < slow; ++i) {
    ranks.push_back(start_rank([this, i, stop_when_over] {
      Wait wait(kLongTimeout, stop_when_over);
      receive_all(receiver(i), 1, 1000, wait);
    }));
  }
  std::uint64_t sent = 0;
  Wait wait(kLongTimeout, nullptr);
  send_one(source(), 1, sent++, wait);
  (void)receive_one(receiver(slow), 1, 0, wait);  // and holds it

  Wait short_wait(300ms, nullptr);
  const auto began = Clock::now();
  try {
    for (;;) send_one(source(), 1, sent++, short_wait);
    FAIL() << "the source was never held back";
  } catch (const TimeoutError& error) {
    --sent;  // the one that was not
    EXPECT_EQ(error.rank(), kFirstReceiverRank + slow) << error.what();
    EXPECT_NE(std::string(error.what()).find(concat("rank ", kFirstReceiverRank + slow)), std::string::npos)
        << error.what();
  }
  EXPECT_GE(Clock::now() - began, 300ms);
  EXPECT_EQ(source().waiting_for(), kFirstReceiverRank + slow);
  // Buckets 0 .. sent-1 are filled; the slow receiver is at bucket 0.
  EXPECT_GE(sent, kBuffers);
  EXPECT_LE(sent - 1, kBuffers);

  over = true;
  for (auto& rank : ranks) EXPECT_THROW(rank.get(), std::runtime_error);
  recover(2);
  expect_sync_works(2, 20);
}

TEST_P(CommunicatorTest, ReceiverTimesOutOnASilentSourceAndNamesIt) {
  make(2);
  Wait wait(120ms, nullptr);
  BucketHeader header;
  const auto began = Clock::now();
  try {
    (void)receiver(0).receive(header, wait);
    FAIL() << "received what nobody sent";
  } catch (const TimeoutError& error) {
    EXPECT_EQ(error.rank(), kSourceRank) << error.what();
  }
  EXPECT_GE(Clock::now() - began, 120ms);
  EXPECT_LE(Clock::now() - began, 120ms + kAtOnce);
}

TEST_P(CommunicatorTest, KeepsItsFirstErrorUntilReset) {
  make(2);
  Wait wait(10ms, nullptr);
  BucketHeader header;
  EXPECT_THROW((void)receiver(0).receive(header, wait), TimeoutError);
  Wait fresh(kLongTimeout, nullptr);
  EXPECT_THROW((void)receiver(0).receive(header, fresh), TimeoutError);  // at once
  recover(2);
  expect_sync_works(2, 10);
}

TEST_P(CommunicatorTest, CallsTheHookWhileItWaits) {
  make(1);
  int source_calls = 0;
  int receiver_calls = 0;
  Wait receiver_wait(400ms, [&] { ++receiver_calls; });
  BucketHeader header;
  EXPECT_THROW((void)receiver(0).receive(header, receiver_wait), TimeoutError);
  EXPECT_GE(receiver_calls, 4);
  EXPECT_LE(receiver_calls, 400);

  recover(2);
  Wait source_wait(400ms, [&] { ++source_calls; });
  EXPECT_THROW(
      {
        for (std::uint64_t i = 0;; ++i) send_one(source(), 2, i, source_wait);
      },
      TimeoutError);
  EXPECT_GE(source_calls, 4);
  EXPECT_LE(source_calls, 400);
}

TEST_P(CommunicatorTest, PassesTheHooksExceptionThroughAndWorksInTheNextSync) {
  struct Interrupt {};
  make(2);
  int calls = 0;
  Wait wait(kLongTimeout, [&] {
    if (++calls == 2) throw Interrupt();
  });
  BucketHeader header;
  EXPECT_THROW((void)receiver(0).receive(header, wait), Interrupt);
  recover(2);
  expect_sync_works(2, 10);
}

TEST_P(CommunicatorTest, AbortEndsTheWaitsOfEveryRankAtOnce) {
  make(2);
  // What a session does: it knows why (here, a flag), and aborts so that everybody looks.
  std::atomic<bool> failed{false};
  std::atomic<int> waiting{0};
  const auto hook = [&] {
    ++waiting;
    if (failed) throw PeerFailedError("a peer failed", kSourceRank);
  };
  std::vector<std::future<void>> ranks;
  std::vector<std::atomic<bool>> slept(static_cast<std::size_t>(receivers()) + 1);
  for (int i = 0; i < receivers(); ++i) {
    ranks.push_back(start_rank([&, i] {
      Wait wait(kLongTimeout, [&, i] {
        slept[static_cast<std::size_t>(i)] = true;
        hook();
      });
      BucketHeader header;
      (void)receiver(i).receive(header, wait);
    }));
  }
  for (int i = 0; i < receivers(); ++i) {
    while (!slept[static_cast<std::size_t>(i)]) std::this_thread::yield();
  }
  const auto began = Clock::now();
  failed = true;
  source().abort();
  for (auto& rank : ranks) EXPECT_THROW(rank.get(), PeerFailedError);
  EXPECT_LE(Clock::now() - began, kAtOnce);
}

TEST_P(CommunicatorTest, AbortEndsAWaitOfItsOwnSideFromAnotherThread) {
  make(1);
  std::atomic<bool> receiver_waits{false};
  auto receiving = start_rank([&] {
    Wait wait(kLongTimeout, [&] { receiver_waits = true; });
    BucketHeader header;
    (void)receiver(0).receive(header, wait);
  });
  while (!receiver_waits) std::this_thread::yield();
  auto began = Clock::now();
  receiver(0).abort();
  EXPECT_THROW(receiving.get(), StateError);
  EXPECT_LE(Clock::now() - began, kAtOnce);

  std::atomic<bool> source_waits{false};
  auto sending = start_rank([&] {
    Wait wait(kLongTimeout, [&] { source_waits = true; });
    for (std::uint64_t i = 0;; ++i) send_one(source(), 1, i, wait);
  });
  while (!source_waits) std::this_thread::yield();
  began = Clock::now();
  source().abort();
  EXPECT_THROW(sending.get(), StateError);
  EXPECT_LE(Clock::now() - began, kAtOnce);
}

TEST_P(CommunicatorTest, RefusesCallsAfterItsOwnAbortUntilReset) {
  make(2);
  source().abort();
  receiver(0).abort();
  Wait wait(kLongTimeout, nullptr);
  BucketHeader header;
  EXPECT_THROW((void)source().acquire(wait), StateError);
  EXPECT_THROW(source().flush(wait), StateError);
  EXPECT_THROW((void)receiver(0).receive(header, wait), StateError);
  recover(2);
  expect_sync_works(2, 10);
}

TEST_P(CommunicatorTest, StartsAfreshAfterASyncThatWasLeftHalfWay) {
  make(2);
  Wait wait(kLongTimeout, nullptr);
  // The last receiver takes one bucket and goes no further; the source has sent three and is filling none.
  auto sending = start_rank([this] {
    Wait own(kLongTimeout, nullptr);
    for (std::uint64_t i = 0; i < 2; ++i) send_one(source(), 1, i, own);
  });
  const BucketSlot held = receive_one(receiver(0), 1, 0, wait);
  EXPECT_NO_THROW(sending.get());
  recover(2);
  // Handing back what was lent before the reset changes nothing.
  EXPECT_NO_THROW(receiver(0).release(held));
  expect_sync_works(2, 20);
  EXPECT_NO_THROW(receiver(0).release(held));
}

TEST_P(CommunicatorTest, RefusesCallsOutOfOrder) {
  make(2);
  Wait wait(kLongTimeout, nullptr);
  BucketHeader header;
  EXPECT_THROW((void)source().receive(header, wait), StateError);
  EXPECT_THROW((void)receiver(0).acquire(wait), StateError);
  EXPECT_THROW(receiver(0).flush(wait), StateError);
  EXPECT_THROW(source().send(BucketSlot{nullptr, 0, 0, 1}, header, wait), StateError);  // not acquired

  const BucketSlot slot = source().acquire(wait);
  EXPECT_EQ(slot.capacity, kBucketBytes);
  EXPECT_THROW((void)source().acquire(wait), StateError);
  header.index = 1;
  EXPECT_THROW(source().send(slot, header, wait), StateError);
  header.index = 0;
  header.used_bytes = kBucketBytes + 1;
  EXPECT_THROW(source().send(slot, header, wait), InvalidArgument);
  header.used_bytes = 0;
  EXPECT_NO_THROW(source().send(slot, header, wait));

  const BucketSlot got = receiver(0).receive(header, wait);
  EXPECT_THROW(receiver(0).release(BucketSlot{got.data, got.capacity, 1, 1}), StateError);
  EXPECT_NO_THROW(receiver(0).release(got));
  EXPECT_THROW(receiver(0).release(BucketSlot{got.data, got.capacity, 1, 1}), StateError);  // nothing is held

  EXPECT_THROW(source().reset(1), InvalidArgument);
  EXPECT_THROW(receiver(0).reset(0), InvalidArgument);
}

TEST_P(CommunicatorTest, FlushOfNothingReturnsAtOnce) {
  make(2);
  Wait wait(kLongTimeout, nullptr);
  EXPECT_NO_THROW(source().flush(wait));
  EXPECT_NO_THROW(source().drain(wait));
}

TEST_P(CommunicatorTest, EmptyBucketsCarryTheirHeaders) {
  make(2);
  Wait wait(kLongTimeout, nullptr);
  auto sending = start_rank([this] {
    Wait own(kLongTimeout, nullptr);
    for (std::uint64_t i = 0; i < 10; ++i) {
      BucketHeader header;
      header.index = i;
      header.tensors_end = 100 + i;
      source().send(source().acquire(own), header, own);
    }
    source().flush(own);
  });
  std::vector<std::future<void>> others;
  for (int r = 1; r < receivers(); ++r) {
    others.push_back(start_rank([this, r] {
      Wait own(kLongTimeout, nullptr);
      BucketHeader header;
      for (int i = 0; i < 10; ++i) receiver(r).release(receiver(r).receive(header, own));
    }));
  }
  for (std::uint64_t i = 0; i < 10; ++i) {
    BucketHeader header;
    const BucketSlot slot = receiver(0).receive(header, wait);
    EXPECT_EQ(header.index, i);
    EXPECT_EQ(header.used_bytes, 0U);
    EXPECT_EQ(header.tensors_end, 100 + i);
    receiver(0).release(slot);
  }
  EXPECT_NO_THROW(sending.get());
  for (auto& other : others) EXPECT_NO_THROW(other.get());
}

INSTANTIATE_TEST_SUITE_P(Backends, CommunicatorTest,
                         ::testing::Combine(::testing::Values(Backend{"shm", make_group<ShmGroup>},
                                                              Backend{"external", make_group<ExternalGroup>}),
                                            ::testing::Values(1, 2, 3)),
                         [](const auto& instance) {
                           return std::get<0>(instance.param).name + std::to_string(std::get<1>(instance.param)) +
                                  "Receivers";
                         });

}  // namespace
}  // namespace fastsync::testing

// What is particular to shared memory: processes, private pages, damaged peers, ranks that are late by a sync.
#include "comm/shm/shm_communicator.h"

#include <dirent.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <random>

#include "rank_group.h"
#include "support/cpu_time.h"
#include "support/process.h"

namespace fastsync::testing {
namespace {

constexpr std::uint64_t kBucketBytes = 3 * 4096 + 256;

std::unique_ptr<ShmCommunicator> attach(const ShmCommunicator& source, std::uint32_t index) {
  return ShmCommunicator::attach(source.control_fd(), source.data_fd(), index);
}

TEST(ShmCommunicator, IsAvailableHereOrSaysWhyNot) {
  const auto reason = ShmCommunicator::unavailable_reason();
  EXPECT_FALSE(reason.has_value()) << *reason;
}

// --- processes -----------------------------------------------------------------------------------------------------

class ShmProcesses : public ::testing::TestWithParam<int> {};

TEST_P(ShmProcesses, DeliverAThousandBucketsThenAnotherSync) {
  const int receivers = GetParam();
  std::vector<int> ranks;
  for (int i = 0; i < receivers; ++i) ranks.push_back(kFirstReceiverRank + i);
  auto source = ShmCommunicator::create(2, kBucketBytes, ranks, kSourceRank);
  std::vector<Process> processes;
  for (int i = 0; i < receivers; ++i) {
    processes.emplace_back([&source, i] {
      auto receiver = attach(*source, static_cast<std::uint32_t>(i));
      for (const std::uint64_t epoch : {1U, 2U}) {
        receiver->reset(epoch);
        Wait wait(kLongTimeout, nullptr);
        receive_all(*receiver, epoch, 1000, wait);
      }
    });
  }
  for (const std::uint64_t epoch : {1U, 2U}) {
    source->reset(epoch);
    Wait wait(kLongTimeout, nullptr);
    send_all(*source, epoch, 1000, wait);
  }
  for (auto& process : processes) EXPECT_EQ(process.join(), 0);
}

TEST_P(ShmProcesses, KilledReceiverLeavesTheSourceAwake) {
  const int receivers = GetParam();
  std::vector<int> ranks;
  for (int i = 0; i < receivers; ++i) ranks.push_back(kFirstReceiverRank + i);
  auto source = ShmCommunicator::create(2, kBucketBytes, ranks, kSourceRank);
  source->reset(1);
  Signal there;
  std::vector<Process> processes;
  for (int i = 0; i < receivers; ++i) {
    processes.emplace_back([&, i] {
      auto receiver = attach(*source, static_cast<std::uint32_t>(i));
      receiver->reset(1);
      Wait wait(kLongTimeout, nullptr);
      const BucketSlot held = receive_one(*receiver, 1, 0, wait);
      if (i == 0) {
        there.give();
        for (;;) ::pause();
      }
      receiver->release(held);
      try {
        receive_all(*receiver, 1, 1000, wait);
      } catch (const Error&) {
      }
    });
  }
  Wait first(kLongTimeout, nullptr);
  send_one(*source, 1, 0, first);
  there.take();
  int calls = 0;
  std::optional<Clock::time_point> killed;
  Wait wait(kLongTimeout, [&] {
    if (++calls == 2) {
      processes[0].kill(SIGKILL);
      killed = Clock::now();
    }
    if (processes[0].is_dead()) throw PeerLostError("rank 11 is gone", kFirstReceiverRank);
  });
  try {
    for (std::uint64_t i = 1;; ++i) send_one(*source, 1, i, wait);
    FAIL();
  } catch (const PeerLostError& error) {
    EXPECT_EQ(error.rank(), kFirstReceiverRank);
  }
  ASSERT_TRUE(killed.has_value());
  EXPECT_LE(Clock::now() - *killed, kAtOnce);
  EXPECT_EQ(processes[0].join(), -SIGKILL);
}

INSTANTIATE_TEST_SUITE_P(Receivers, ShmProcesses, ::testing::Values(1, 2, 3));

TEST(ShmCommunicator, KilledSourceLeavesTheReceiversAwake) {
  // The source is a child; the descriptors come from here, so only the memory is shared.
  auto made = ShmCommunicator::create(2, kBucketBytes, {kFirstReceiverRank}, kSourceRank);
  auto receiver = attach(*made, 0);
  receiver->reset(1);
  Process source([&] {
    made->reset(1);
    Wait wait(kLongTimeout, nullptr);
    send_one(*made, 1, 0, wait);
    for (;;) ::pause();
  });
  Wait first(kLongTimeout, nullptr);
  receiver->release(receive_one(*receiver, 1, 0, first));
  source.kill(SIGKILL);
  const auto killed = Clock::now();
  Wait wait(kLongTimeout, [&] {
    if (source.is_dead()) throw PeerLostError("rank 10 is gone", kSourceRank);
  });
  BucketHeader header;
  EXPECT_THROW((void)receiver->receive(header, wait), PeerLostError);
  EXPECT_LE(Clock::now() - killed, kAtOnce);
}

TEST(ShmCommunicator, StoppedReceiverHoldsTheSourceToItsDeadlineAndJoinsTheNextSync) {
  auto source = ShmCommunicator::create(2, kBucketBytes, {kFirstReceiverRank}, kSourceRank);
  Signal there;
  Process process([&] {
    auto receiver = attach(*source, 0);
    receiver->reset(1);
    Wait wait(kLongTimeout, nullptr);
    const BucketSlot held = receive_one(*receiver, 1, 0, wait);
    there.give();
    ::raise(SIGSTOP);
    // It wakes up in a sync that is over: its bucket still is what it was.
    if (!holds_pattern(held.data, used_bytes_of(0, kBucketBytes), 1, 0)) throw InternalError("torn bucket");
    receiver->release(held);
    receiver->reset(3);
    Wait next(kLongTimeout, nullptr);
    receive_all(*receiver, 3, 50, next);
  });
  source->reset(1);
  Wait wait(200ms, nullptr);
  send_one(*source, 1, 0, wait);
  there.take();
  try {
    for (std::uint64_t i = 1;; ++i) send_one(*source, 1, i, wait);
    FAIL();
  } catch (const TimeoutError& error) {
    EXPECT_EQ(error.rank(), kFirstReceiverRank);
  }
  source->reset(2);
  // The stopped rank may be looking at bucket 0: nothing is written over it.
  Wait second(200ms, nullptr);
  try {
    send_one(*source, 2, 0, second);
    FAIL() << "wrote over a bucket that a stopped reader holds";
  } catch (const TimeoutError& error) {
    EXPECT_EQ(error.rank(), kFirstReceiverRank);
    EXPECT_NE(std::string(error.what()).find("join"), std::string::npos) << error.what();
  }
  process.kill(SIGCONT);
  source->reset(3);
  Wait third(kLongTimeout, nullptr);
  EXPECT_NO_THROW(send_all(*source, 3, 50, third));
  EXPECT_EQ(process.join(), 0);
}

// --- ranks that are late by a sync ---------------------------------------------------------------------------------

class LateRanks : public ::testing::Test {
 protected:
  void SetUp() override {
    source_ = ShmCommunicator::create(2, kBucketBytes, {kFirstReceiverRank, kFirstReceiverRank + 1}, kSourceRank);
    prompt_ = attach(*source_, 0);
    late_ = attach(*source_, 1);
    for (auto* rank : {source_.get(), prompt_.get(), late_.get()}) rank->reset(1);
  }
  Wait wait_{kLongTimeout, nullptr};
  std::unique_ptr<ShmCommunicator> source_;
  std::unique_ptr<ShmCommunicator> prompt_;
  std::unique_ptr<ShmCommunicator> late_;
};

TEST_F(LateRanks, BucketThatALateReaderHoldsIsNotWrittenOver) {
  send_one(*source_, 1, 0, wait_);
  prompt_->release(receive_one(*prompt_, 1, 0, wait_));
  const BucketSlot held = receive_one(*late_, 1, 0, wait_);
  source_->reset(2);
  prompt_->reset(2);
  Wait brief(60ms, nullptr);
  EXPECT_THROW((void)source_->acquire(brief), TimeoutError);
  EXPECT_TRUE(holds_pattern(held.data, used_bytes_of(0, kBucketBytes), 1, 0));
  late_->release(held);
  for (auto* rank : {source_.get(), prompt_.get(), late_.get()}) rank->reset(3);
  send_one(*source_, 3, 0, wait_);
  EXPECT_NO_THROW(late_->release(receive_one(*late_, 3, 0, wait_)));
}

TEST_F(LateRanks, LateReleaseDoesNotCountInTheNewEpoch) {
  send_one(*source_, 1, 0, wait_);
  const BucketSlot held = receive_one(*late_, 1, 0, wait_);
  source_->reset(2);
  prompt_->reset(2);
  late_->release(held);  // epoch 1 on its side still
  send_one(*source_, 2, 0, wait_);
  send_one(*source_, 2, 1, wait_);
  for (std::uint64_t i = 0; i < 2; ++i) prompt_->release(receive_one(*prompt_, 2, i, wait_));
  Wait brief(60ms, nullptr);
  EXPECT_THROW((void)source_->acquire(brief), TimeoutError);  // bucket 0 of epoch 2 was not released by the late one
  late_->reset(2);
  EXPECT_NO_THROW(late_->release(receive_one(*late_, 2, 0, wait_)));
  late_->release(held);  // and once more, now foreign on its own side
  EXPECT_NO_THROW(late_->release(receive_one(*late_, 2, 1, wait_)));
}

TEST_F(LateRanks, LateReaderThatHoldsNothingDoesNotDelayTheFirstBuckets) {
  send_one(*source_, 1, 0, wait_);
  prompt_->release(receive_one(*prompt_, 1, 0, wait_));
  late_->release(receive_one(*late_, 1, 0, wait_));
  source_->flush(wait_);
  // It misses epoch 2 altogether, and is late for 3.
  for (const std::uint64_t epoch : {2U, 3U}) {
    source_->reset(epoch);
    prompt_->reset(epoch);
    send_one(*source_, epoch, 0, wait_);
    send_one(*source_, epoch, 1, wait_);
    Wait brief(60ms, nullptr);
    EXPECT_THROW((void)source_->acquire(brief), TimeoutError);
  }
  Wait brief(60ms, nullptr);
  BucketHeader header;
  EXPECT_THROW((void)late_->receive(header, brief),
               TimeoutError);  // it sees nothing of an epoch that it has not joined
  late_->reset(3);
  for (std::uint64_t i = 0; i < 2; ++i) EXPECT_NO_THROW(late_->release(receive_one(*late_, 3, i, wait_)));
}

TEST_F(LateRanks, ReceiverThatIsAheadDoesNotHoldUpTheEndOfTheSync) {
  send_one(*source_, 1, 0, wait_);
  for (auto* rank : {prompt_.get(), late_.get()}) {
    rank->release(receive_one(*rank, 1, 0, wait_));
    rank->reset(2);
  }
  EXPECT_NO_THROW(source_->flush(wait_));
  EXPECT_EQ(source_->waiting_for(), -1);
}

// --- what a callee writes ------------------------------------------------------------------------------------------

TEST(ShmPrivatePages, WhatOneReceiverWritesNobodyElseSeesAndTheNextBucketReplaces) {
  auto source = ShmCommunicator::create(2, kBucketBytes, {11, 12}, kSourceRank);
  auto scribbler = attach(*source, 0);
  auto reader = attach(*source, 1);
  for (auto* rank : {source.get(), scribbler.get(), reader.get()}) rank->reset(1);
  Wait wait(kLongTimeout, nullptr);
  for (std::uint64_t bucket = 0; bucket < 6; ++bucket) {
    const BucketSlot out = source->acquire(wait);
    fill_pattern(out.data, kBucketBytes, 1, bucket);
    BucketHeader header;
    header.index = bucket;
    header.used_bytes = kBucketBytes;
    source->send(out, header, wait);

    const BucketSlot mine = scribbler->receive(header, wait);
    ASSERT_TRUE(holds_pattern(mine.data, kBucketBytes, 1, bucket)) << "stale bytes in bucket " << bucket;
    scribbler->mark_exposed(mine);
    std::memset(mine.data, 0xEE, kBucketBytes);

    const BucketSlot theirs = reader->receive(header, wait);
    EXPECT_TRUE(holds_pattern(theirs.data, kBucketBytes, 1, bucket));
    EXPECT_TRUE(holds_pattern(out.data, kBucketBytes, 1, bucket));
    reader->release(theirs);
    scribbler->release(mine);
    EXPECT_TRUE(holds_pattern(mine.data, kBucketBytes, 1, bucket)) << "the private copy outlives release()";
  }
}

TEST(ShmPrivatePages, WriteThroughAPointerThatWasKeptTooLongDoesNotHideTheNextBucket) {
  auto source = ShmCommunicator::create(1, kBucketBytes, {11}, kSourceRank);
  auto receiver = attach(*source, 0);
  source->reset(1);
  receiver->reset(1);
  Wait wait(kLongTimeout, nullptr);
  for (std::uint64_t bucket = 0; bucket < 4; ++bucket) {
    send_one(*source, 1, bucket, wait);
    const BucketSlot slot = receive_one(*receiver, 1, bucket, wait);
    receiver->mark_exposed(slot);
    receiver->release(slot);
    std::memset(slot.data, 0xEE, kBucketBytes);
  }
}

TEST(ShmPrivatePages, SlotLeftHeldAtAResetIsFreshAfterwards) {
  auto source = ShmCommunicator::create(1, kBucketBytes, {11}, kSourceRank);
  auto receiver = attach(*source, 0);
  source->reset(1);
  receiver->reset(1);
  Wait wait(kLongTimeout, nullptr);
  send_one(*source, 1, 0, wait);
  const BucketSlot slot = receive_one(*receiver, 1, 0, wait);
  receiver->mark_exposed(slot);
  std::memset(slot.data, 0xEE, kBucketBytes);
  receiver->reset(2);
  source->reset(2);
  send_one(*source, 2, 0, wait);
  EXPECT_NO_THROW((void)receive_one(*receiver, 2, 0, wait));
}

TEST(ShmPrivatePages, AreFoundPreciselyOrDroppedAlways) {
  const std::uint64_t bytes = 4 * page_bytes();
  const ShmSegment segment = ShmSegment::written_here("test", bytes);
  const auto map = [&] {
    return ShmMapping::attach(segment.peer_fd(), bytes, ShmMapping::Mode::kPrivate, "test memory");
  };
  {
    const ShmMapping mapping = map();
    PrivatePages pages(mapping.data());
    EXPECT_TRUE(pages.precise());  // this kernel's pagemap can be read
    mapping.data()[3 * page_bytes()] = std::byte{1};
    pages.drop_written(mapping.data(), bytes);
    EXPECT_EQ(mapping.data()[3 * page_bytes()], std::byte{0});
  }
  {
    // A trial page on which the answer cannot be right (it is no file's) means: trust it nowhere.
    void* anonymous = ::mmap(nullptr, page_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(anonymous, MAP_FAILED);
    *static_cast<volatile char*>(anonymous) = 1;
    PrivatePages pages(static_cast<std::byte*>(anonymous));
    EXPECT_FALSE(pages.precise());
    const ShmMapping mapping = map();
    mapping.data()[5] = std::byte{1};
    pages.drop_written(mapping.data(), bytes);
    EXPECT_EQ(mapping.data()[5], std::byte{0});
    ::munmap(anonymous, page_bytes());
  }
}

TEST(ShmCommunicator, ReceiversCannotWriteIntoTheSourcesMemory) {
  auto source = ShmCommunicator::create(2, kBucketBytes, {11}, kSourceRank);
  EXPECT_EQ(source->protection_note(), "");
  EXPECT_EQ(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, source->data_fd(), 0), MAP_FAILED);
  // Not even by opening it again.
  const OwnedFd again(::open(concat("/proc/self/fd/", source->data_fd()).c_str(), O_RDWR | O_CLOEXEC));
  if (again) {
    const char byte = 1;
    EXPECT_EQ(::pwrite(again.get(), &byte, 1, 0), -1);
    EXPECT_EQ(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, again.get(), 0), MAP_FAILED);
  }
  EXPECT_NE(::ftruncate(source->control_fd(), 0), 0);
}

// --- peers that are not what they say ------------------------------------------------------------------------------

TEST(ShmAttach, RefusesDescriptorsThatAreNotTheSources) {
  auto source = ShmCommunicator::create(2, kBucketBytes, {11}, kSourceRank);
  auto other = ShmCommunicator::create(2, 2 * kBucketBytes + 256, {11}, kSourceRank);
  int pipe_ends[2];
  ASSERT_EQ(::pipe(pipe_ends), 0);
  const OwnedFd pipe_read(pipe_ends[0]);
  const OwnedFd pipe_write(pipe_ends[1]);
  const OwnedFd unsealed(::memfd_create("unsealed", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(unsealed.get(), 4096), 0);
  const OwnedFd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  const Buffer zeros = Buffer::shared(4096);
  const Buffer tiny = Buffer::shared(64);
  for (const int fd : {-1, 1 << 20, pipe_read.get(), unsealed.get(), null.get(), zeros.fd(), tiny.fd()}) {
    EXPECT_THROW((void)ShmCommunicator::attach(fd, source->data_fd(), 0), CommError) << fd;
    EXPECT_THROW((void)ShmCommunicator::attach(source->control_fd(), fd, 0), CommError) << fd;
  }
  EXPECT_THROW((void)ShmCommunicator::attach(source->control_fd(), other->data_fd(), 0), CommError);
  EXPECT_THROW((void)ShmCommunicator::attach(source->data_fd(), source->control_fd(), 0), Error);
  EXPECT_THROW((void)ShmCommunicator::attach(source->control_fd(), source->data_fd(), 1), CommError);
  EXPECT_NO_THROW((void)ShmCommunicator::attach(source->control_fd(), source->data_fd(), 0));
}

TEST(ShmAttach, SurvivesAnyControlRegion) {
  std::mt19937_64 random(1);
  int refused = 0;
  for (int round = 0; round < 400; ++round) {
    auto source = ShmCommunicator::create(2, kBucketBytes, {11, 12}, kSourceRank);
    source->reset(1);
    Wait wait(kLongTimeout, nullptr);
    send_one(*source, 1, 0, wait);
    const std::uint64_t bytes = ShmMapping::checked_size(source->control_fd(), "control");
    const ShmMapping control = ShmMapping::attach(source->control_fd(), bytes, ShmMapping::Mode::kShared, "control");
    // Damage a few bytes where something lies; the doorbells only make a waiter look again.
    for (int i = 0; i < 3; ++i) control.data()[random() % 704] = static_cast<std::byte>(random() >> (random() % 64));
    try {
      auto receiver = attach(*source, 0);
      receiver->reset(1);
      Wait brief(1ms, nullptr);
      BucketHeader header;
      const BucketSlot slot = receiver->receive(header, brief);
      ASSERT_LE(header.used_bytes, kBucketBytes);
      ASSERT_EQ(header.index, 0U);
      receiver->release(slot);
      Wait source_wait(1ms, nullptr);
      for (std::uint64_t i = 1; i < 4; ++i) send_one(*source, 1, i, source_wait);
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 0);
}

TEST(ShmCommunicator, NamesTheReceiverThatClaimsMoreThanWasSent) {
  auto source = ShmCommunicator::create(1, kBucketBytes, {12}, kSourceRank);
  auto liar = attach(*source, 0);
  source->reset(1);
  liar->reset(1);
  Wait wait(1s, nullptr);
  send_one(*source, 1, 0, wait);
  // The liar's counter is the word of the control region that moves from (epoch 1, 0) to (epoch 1, 1) when it releases.
  const std::uint64_t bytes = ShmMapping::checked_size(source->control_fd(), "control");
  const ShmMapping control = ShmMapping::attach(source->control_fd(), bytes, ShmMapping::Mode::kShared, "control");
  auto* words = reinterpret_cast<std::atomic<std::uint64_t>*>(control.data());
  std::vector<std::uint64_t> before(bytes / sizeof(std::uint64_t));
  for (std::size_t i = 0; i < before.size(); ++i) before[i] = words[i];
  liar->release(receive_one(*liar, 1, 0, wait));
  int found = 0;
  for (std::size_t i = 0; i < before.size(); ++i) {
    if (before[i] != std::uint64_t{1} << 32 || words[i] != before[i] + 1) continue;
    words[i] = before[i] + 1000;
    ++found;
  }
  ASSERT_EQ(found, 1);
  try {
    (void)source->acquire(wait);
    FAIL();
  } catch (const CommError& error) {
    EXPECT_EQ(error.rank(), 12) << error.what();
  }
}

// --- sizes and leftovers -------------------------------------------------------------------------------------------

TEST(ShmCommunicator, RefusesSizesThatMakeNoSense) {
  EXPECT_THROW((void)ShmCommunicator::create(0, 256, {1}), InvalidArgument);
  EXPECT_THROW((void)ShmCommunicator::create(2, 0, {1}), InvalidArgument);
  EXPECT_THROW((void)ShmCommunicator::create(2, 255, {1}), InvalidArgument);
  EXPECT_THROW((void)ShmCommunicator::create(2000, 256, {1}), InvalidArgument);
  EXPECT_THROW((void)ShmCommunicator::create(2, ~std::uint64_t{255}, {1}), InvalidArgument);
}

// Without taking memory until there is none.
TEST(ShmCommunicator, RefusesAtOnceWhatTheMachineCannotHold) {
  const double began = thread_cpu_seconds();
  try {
    (void)ShmCommunicator::create(2, std::uint64_t{1} << 40, {1});
    FAIL();
  } catch (const DeviceError& error) {
    EXPECT_NE(std::string(error.what()).find("2199023255552 bytes"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("lower bucket_bytes"), std::string::npos) << error.what();
  }
  EXPECT_LE(thread_cpu_seconds() - began, 1);
}

TEST(ShmCommunicator, WorksWithoutReceivers) {
  auto source = ShmCommunicator::create(2, kBucketBytes, {}, kSourceRank);
  source->reset(1);
  Wait wait(100ms, nullptr);
  EXPECT_NO_THROW(send_all(*source, 1, 10, wait));
}

TEST(ShmCommunicator, LeavesNoDescriptorBehind) {
  const int before = open_descriptors();
  for (int round = 0; round < 20; ++round) {
    ShmGroup group(2, kBucketBytes, 2);
    group.reset_all(1, 2);
    Wait wait(kLongTimeout, nullptr);
    send_one(group.source(), 1, 0, wait);
    for (int i = 0; i < 2; ++i) {
      const BucketSlot slot = receive_one(group.receiver(i), 1, 0, wait);
      group.receiver(i).mark_exposed(slot);
      group.receiver(i).release(slot);
    }
  }
  EXPECT_EQ(open_descriptors(), before);
}

TEST(ShmCommunicator, MemoryOutlivesTheSourceForWhoeverStillReads) {
  auto source = ShmCommunicator::create(2, kBucketBytes, {11}, kSourceRank);
  auto receiver = attach(*source, 0);
  source->reset(1);
  receiver->reset(1);
  Wait wait(kLongTimeout, nullptr);
  send_one(*source, 1, 0, wait);
  source.reset();
  EXPECT_NO_THROW(receiver->release(receive_one(*receiver, 1, 0, wait)));
}

}  // namespace
}  // namespace fastsync::testing

// How communicators of the double come to be: who is let in, who is refused, and what a missing rank means. Also its faults.
#include <gtest/gtest.h>

#include <string>

#include "doubles/nccl_rank.h"

namespace fastsync::testing::nccl {
namespace {

using namespace std::chrono_literals;

constexpr std::chrono::milliseconds kClearlyHanging{300};

class NcclDoubleInit : public ::testing::Test {
 protected:
  void SetUp() override {
    if (fake_cuda_path() == nullptr || fake_nccl_path() == nullptr) GTEST_SKIP() << "the doubles were not built";
  }
};

void expect_broadcast_works(const Rank& rank, ncclComm_t communicator, int root) {
  int mine = -1;
  ASSERT_EQ(rank.nccl.ncclCommUserRank(communicator, &mine), ncclSuccess);
  void* memory = rank.buffer(pattern(2000, static_cast<std::uint64_t>(mine)));
  ASSERT_EQ(rank.broadcast(memory, memory, 2000, root, communicator), ncclSuccess) << rank.last_error();
  ASSERT_TRUE(rank.finish());
  EXPECT_TRUE(rank.bytes(memory, 2000) == pattern(2000, static_cast<std::uint64_t>(root)));
}

// --- Without blocking -------------------------------------------------------------------------------------------------

TEST_F(NcclDoubleInit, IsInProgressUntilAllRanksAreThere) {
  Ranks ranks;
  const Signal waited;
  ranks.add_all(2, [&](Rank& rank) {
    const ncclUniqueId id = ranks.share_id(rank, 2);
    if (rank.rank() == 1) waited.take();
    ncclComm_t communicator = rank.start(2, id);
    ASSERT_NE(communicator, nullptr);
    if (rank.rank() == 0) {
      EXPECT_FALSE(comes_true([&] { return rank.state(communicator) != ncclInProgress; }, kClearlyHanging));
      int count = 0;
      EXPECT_EQ(rank.nccl.ncclCommCount(communicator, &count), ncclInvalidArgument) << "not before it is there";
      waited.give();
    }
    ASSERT_EQ(rank.settled(communicator), ncclSuccess);
    int count = 0;
    int device = -1;
    EXPECT_EQ(rank.nccl.ncclCommCount(communicator, &count), ncclSuccess);
    EXPECT_EQ(rank.nccl.ncclCommCuDevice(communicator, &device), ncclSuccess);
    EXPECT_EQ(count, 2);
    EXPECT_EQ(device, rank.rank());
    expect_broadcast_works(rank, communicator, 0);
    EXPECT_EQ(rank.nccl.ncclCommDestroy(communicator), ncclSuccess);
  });
  ranks.join_all();
}

TEST_F(NcclDoubleInit, QueuesTheFirstOperationAfterTheCall) {
  Ranks ranks;
  ranks.add_all(2, [&](Rank& rank) {
    ncclComm_t communicator = rank.join(2, ranks.share_id(rank, 2));
    void* memory = rank.buffer(1000);
    const ncclResult_t first = rank.nccl.ncclBroadcast(memory, memory, 1000, ncclUint8, 0, communicator, rank.stream);
    EXPECT_TRUE(first == ncclInProgress || first == ncclSuccess) << first;
    ASSERT_EQ(rank.settled(communicator), ncclSuccess);
    EXPECT_EQ(rank.nccl.ncclBroadcast(memory, memory, 1000, ncclUint8, 0, communicator, rank.stream), ncclSuccess);
    EXPECT_TRUE(rank.finish());
    EXPECT_EQ(rank.nccl.ncclCommDestroy(communicator), ncclSuccess);
  });
  ranks.join_all();
}

TEST_F(NcclDoubleInit, WaitsForARankThatNeverComesUntilAbort) {
  Ranks ranks;
  const Signal aborted;
  ranks.add_all(2, [&](Rank& rank) {
    (void)rank.buffer(1);  // a sanitizer starts its own thread with the first
    const int threads = running_threads();
    const ncclUniqueId id = ranks.share_id(rank, 2);
    const int descriptors = open_descriptors();
    ncclComm_t communicator = rank.start(3, id);
    EXPECT_FALSE(comes_true([&] { return rank.state(communicator) != ncclInProgress; }, kClearlyHanging));
    if (rank.rank() == 1) {
      aborted.take();  // the other rank, which served the id
      EXPECT_FALSE(comes_true([&] { return rank.state(communicator) != ncclInProgress; }, kClearlyHanging));
    }
    EXPECT_EQ(rank.nccl.ncclCommAbort(communicator), ncclSuccess);
    if (rank.rank() == 0) {
      aborted.give();
      // The server of the id goes when the last rank that waits there has gone.
      EXPECT_TRUE(comes_true([&] { return running_threads() == threads; })) << running_threads();
    } else {
      EXPECT_EQ(open_descriptors(), descriptors);
    }
    EXPECT_EQ(rank.nccl.live("communicator"), 0);
  });
  ranks.join_all();
}

// --- With blocking ----------------------------------------------------------------------------------------------------

TEST_F(NcclDoubleInit, BlocksByDefault) {
  Ranks ranks;
  ranks.add_all(2, [&](Rank& rank) {
    ncclComm_t communicator = nullptr;
    ASSERT_EQ(rank.nccl.ncclCommInitRank(&communicator, 2, ranks.share_id(rank, 2), rank.rank()), ncclSuccess);
    EXPECT_EQ(rank.state(communicator), ncclSuccess);
    void* memory = rank.buffer(100);
    EXPECT_EQ(rank.nccl.ncclBroadcast(memory, memory, 100, ncclUint8, 0, communicator, rank.stream), ncclSuccess);
    EXPECT_TRUE(rank.finish());
    EXPECT_EQ(rank.nccl.ncclCommFinalize(communicator), ncclSuccess);
    EXPECT_EQ(rank.nccl.ncclCommDestroy(communicator), ncclSuccess);
  });
  ranks.join_all();
}

TEST_F(NcclDoubleInit, JoinsSeveralDevicesOfOneProcessInAGroup) {
  Ranks ranks;
  ranks.add(0, 0, [&](Rank& rank) {
    const ncclUniqueId id = ranks.share_id(rank, 1);
    CUcontext second = nullptr;
    ASSERT_EQ(rank.cuda.retain(&second, 1), CUDA_SUCCESS);
    ncclComm_t communicators[2] = {nullptr, nullptr};
    ASSERT_EQ(rank.nccl.ncclGroupStart(), ncclSuccess);
    ASSERT_EQ(rank.nccl.ncclCommInitRank(&communicators[0], 2, id, 0), ncclSuccess);
    ASSERT_EQ(rank.cuda.set_current(second), CUDA_SUCCESS);
    ASSERT_EQ(rank.nccl.ncclCommInitRank(&communicators[1], 2, id, 1), ncclSuccess);
    ASSERT_EQ(rank.nccl.ncclGroupEnd(), ncclSuccess) << rank.last_error();
    // A thread whose context is of another device may not use it.
    void* memory = rank.buffer(100);
    EXPECT_EQ(rank.nccl.ncclBroadcast(memory, memory, 100, ncclUint8, 0, communicators[0], rank.stream),
              ncclInvalidUsage);
    EXPECT_NE(rank.last_error().find("device 1"), std::string::npos) << rank.last_error();
    for (ncclComm_t communicator : communicators) EXPECT_EQ(rank.nccl.ncclCommAbort(communicator), ncclSuccess);
  });
  ranks.join_all();
}

TEST_F(NcclDoubleInit, AbortByAnotherThreadEndsABlockingInit) {
  Ranks ranks;
  ranks.add(0, 0, [&](Rank& rank) {
    const ncclUniqueId id = ranks.share_id(rank, 1);
    ncclComm_t communicator = nullptr;  // written before the call blocks
    std::thread aborts([&] {
      EXPECT_TRUE(comes_true([&] { return __atomic_load_n(&communicator, __ATOMIC_ACQUIRE) != nullptr; }));
      EXPECT_EQ(rank.nccl.ncclCommAbort(communicator), ncclSuccess);
    });
    EXPECT_NE(rank.nccl.ncclCommInitRank(&communicator, 2, id, 0), ncclSuccess);
    aborts.join();
    EXPECT_EQ(rank.nccl.live("communicator"), 0);
    EXPECT_EQ(rank.nccl.live("rendezvous"), 0);
  });
  ranks.join_all();
}

// --- Refusals ---------------------------------------------------------------------------------------------------------

// Starts without blocking and expects all ranks to be refused with a text that has these words.
void expect_refused(Rank& rank, const Ranks& ranks, const std::vector<std::string>& words) {
  ncclComm_t communicator = rank.start(2, ranks.share_id(rank, 2));
  EXPECT_EQ(rank.settled(communicator), ncclInvalidUsage);  // at once or a little later
  for (const std::string& word : words) {
    EXPECT_NE(rank.last_error().find(word), std::string::npos) << rank.last_error();
  }
  EXPECT_EQ(rank.nccl.ncclCommAbort(communicator), ncclSuccess);
}

TEST_F(NcclDoubleInit, RefusesAllRanksWhereVersionsDiffer) {
  Ranks ranks;
  const auto body = [&](Rank& rank) { expect_refused(rank, ranks, {"version", "2.28.9", "2.30.7"}); };
  ranks.add(0, 0, body);
  ranks.add(1, 1, body, {{"FASTSYNC_FAKE_NCCL_VERSION", "23007"}});
  ranks.join_all();
}

TEST_F(NcclDoubleInit, RefusesTwoRanksOnOneDevice) {
  Ranks ranks(Environment{{"NCCL_MULTI_RANK_GPU_ENABLE", "1"}});  // which this version does not know
  const auto body = [&](Rank& rank) { expect_refused(rank, ranks, {"Duplicate GPU", "rank 0", "rank 1"}); };
  ranks.add(0, 0, body);
  ranks.add(1, 0, body);
  ranks.join_all();
}

TEST_F(NcclDoubleInit, RefusesOneDeviceUnderTwoNumbers) {
  Ranks ranks;
  const auto body = [&](Rank& rank) { expect_refused(rank, ranks, {"Duplicate GPU"}); };
  ranks.add(0, 1, body);
  ranks.add(1, 0, body, {{"CUDA_VISIBLE_DEVICES", "1,0"}});
  ranks.join_all();
}

TEST_F(NcclDoubleInit, LetsRanksShareADeviceFromTwoThirtyOn) {
  Ranks ranks(Environment{{"NCCL_MULTI_RANK_GPU_ENABLE", "1"}, {"FASTSYNC_FAKE_NCCL_VERSION", "23003"}});
  const auto body = [&](Rank& rank) {
    ncclComm_t communicator = rank.join(2, ranks.share_id(rank, 2));
    expect_broadcast_works(rank, communicator, 1);
    EXPECT_EQ(rank.nccl.ncclCommDestroy(communicator), ncclSuccess);
  };
  ranks.add(0, 0, body);
  ranks.add(1, 0, body);
  ranks.join_all();
}

TEST_F(NcclDoubleInit, RefusesSharedDevicesWithoutTheSwitch) {
  Ranks ranks(Environment{{"FASTSYNC_FAKE_NCCL_VERSION", "23007"}});
  const auto body = [&](Rank& rank) { expect_refused(rank, ranks, {"Multiple Ranks"}); };
  ranks.add(0, 0, body);
  ranks.add(1, 0, body);
  ranks.join_all();
}

TEST_F(NcclDoubleInit, RefusesAnUnpreparedConfiguration) {
  Ranks ranks;
  ranks.add(0, 0, [&](Rank& rank) {
    const ncclUniqueId id = ranks.share_id(rank, 1);
    ncclComm_t communicator = nullptr;
    ncclConfig_t config = Rank::nonblocking();
    config.magic = 0;
    EXPECT_EQ(rank.nccl.ncclCommInitRankConfig(&communicator, 1, id, 0, &config), ncclInvalidArgument);
    config = Rank::nonblocking();
    config.blocking = 2;
    EXPECT_EQ(rank.nccl.ncclCommInitRankConfig(&communicator, 1, id, 0, &config), ncclInvalidArgument);
    EXPECT_NE(rank.last_error().find("blocking"), std::string::npos);
    config = Rank::nonblocking();
    config.version = 21300;  // from before there was a choice: it blocks
    EXPECT_EQ(rank.nccl.ncclCommInitRankConfig(&communicator, 1, id, 0, &config), ncclSuccess);
    EXPECT_EQ(rank.state(communicator), ncclSuccess);
    EXPECT_EQ(rank.nccl.ncclCommDestroy(communicator), ncclSuccess);
    EXPECT_EQ(rank.nccl.ncclCommInitRank(&communicator, 2, id, 2), ncclInvalidArgument);
    EXPECT_EQ(rank.nccl.ncclCommInitRank(&communicator, 1, ncclUniqueId{}, 0), ncclInvalidArgument);
  });
  ranks.join_all();
}

TEST_F(NcclDoubleInit, WantsTheContextOfItsDeviceOnTheCallingThread) {
  Ranks ranks;
  ranks.add(0, 0, [&](Rank& rank) {
    const ncclUniqueId id = ranks.share_id(rank, 1);
    ncclComm_t communicator = nullptr;
    ASSERT_EQ(rank.cuda.set_current(nullptr), CUDA_SUCCESS);
    EXPECT_EQ(rank.nccl.ncclCommInitRank(&communicator, 1, id, 0), ncclInvalidUsage);
    EXPECT_NE(rank.last_error().find("context"), std::string::npos) << rank.last_error();
    ASSERT_EQ(rank.cuda.set_current(rank.context), CUDA_SUCCESS);
    ASSERT_EQ(rank.nccl.ncclCommInitRank(&communicator, 1, id, 0), ncclSuccess) << rank.last_error();
    void* memory = rank.buffer(100);
    ASSERT_EQ(rank.cuda.set_current(nullptr), CUDA_SUCCESS);
    EXPECT_EQ(rank.nccl.ncclBroadcast(memory, memory, 100, ncclUint8, 0, communicator, rank.stream), ncclInvalidUsage);
    EXPECT_NE(rank.last_error().find("no current context"), std::string::npos) << rank.last_error();
    ASSERT_EQ(rank.cuda.set_current(rank.context), CUDA_SUCCESS);
    EXPECT_EQ(rank.nccl.ncclCommDestroy(communicator), ncclSuccess);
  });
  ranks.join_all();
}

TEST_F(NcclDoubleInit, HasOnlyTheFunctionsOfItsVersion) {
  struct Case {
    const char* version;
    bool split, memory, shrink, revoke;
  };
  for (const Case& expected : {Case{"21703", false, false, false, false}, Case{"21801", true, false, false, false},
                               Case{"22702", true, true, false, false}, Case{"22808", true, true, true, false},
                               Case{"22809", true, true, true, true}, Case{"", true, true, true, true}}) {
    Ranks ranks(Environment{{"FASTSYNC_FAKE_NCCL_VERSION", expected.version}});
    ranks.add(0, 0, [&](Rank& rank) {
      EXPECT_EQ(rank.nccl_library().has("ncclCommSplit"), expected.split) << expected.version;
      EXPECT_EQ(rank.nccl_library().has("ncclMemAlloc"), expected.memory) << expected.version;
      EXPECT_EQ(rank.nccl_library().has("ncclCommShrink"), expected.shrink) << expected.version;
      EXPECT_EQ(rank.nccl_library().has("ncclCommRevoke"), expected.revoke) << expected.version;
      int version = 0;
      EXPECT_EQ(rank.nccl.ncclGetVersion(&version), ncclSuccess);
      EXPECT_EQ(std::to_string(version), *expected.version == '\0' ? "22809" : expected.version);
    });
    ranks.join_all();
  }
}

// --- Children ---------------------------------------------------------------------------------------------------------

// Waits as a caller without blocking has to: for the parent.
ncclComm_t settled_child(const Rank& rank, ncclComm_t parent, ncclResult_t result, ncclComm_t* child) {
  EXPECT_TRUE(result == ncclInProgress || result == ncclSuccess) << result;
  EXPECT_EQ(rank.settled(parent), ncclSuccess) << rank.last_error();
  return *child;
}

TEST_F(NcclDoubleInit, SplitsByColorInTheOrderOfTheKeys) {
  Ranks ranks;
  ranks.add_all(3, [&](Rank& rank) {
    ncclComm_t communicator = rank.join(3, ranks.share_id(rank, 3));
    // Rank 1 stays alone, 2 comes before 0.
    const int color = rank.rank() == 1 ? kNcclSplitNoColor : 7;
    ncclComm_t child = nullptr;
    const ncclResult_t result = rank.nccl.ncclCommSplit(communicator, color, -rank.rank(), &child, nullptr);
    (void)settled_child(rank, communicator, result, &child);
    ASSERT_EQ(child == nullptr, rank.rank() == 1);
    if (child != nullptr) {
      int number = -1;
      EXPECT_EQ(rank.nccl.ncclCommUserRank(child, &number), ncclSuccess);
      EXPECT_EQ(number, rank.rank() == 2 ? 0 : 1);
      expect_broadcast_works(rank, child, 0);
      EXPECT_EQ(rank.nccl.ncclCommDestroy(child), ncclSuccess);
    }
    EXPECT_EQ(rank.nccl.ncclCommDestroy(communicator), ncclSuccess);
    EXPECT_EQ(rank.nccl.live("rendezvous"), 0);
  });
  ranks.join_all();
}

TEST_F(NcclDoubleInit, ShrinksAroundADeadRank) {
  Ranks ranks(Environment{{"FASTSYNC_FAKE_FAULTS", "rank=1 symbol=ncclBroadcast action=kill"}});
  ranks.add_all(3, [&](Rank& rank) {
    ncclComm_t communicator = rank.start(3, ranks.share_id(rank, 3));
    (void)rank.settled(communicator);  // the rank that dies may have died by now
    void* memory = rank.buffer(1000);
    (void)rank.broadcast(memory, memory, 1000, 0, communicator);
    EXPECT_TRUE(comes_true([&] { return rank.state(communicator) == ncclRemoteError; }));
    int dead = 1;
    ncclComm_t child = nullptr;
    const ncclResult_t result = rank.nccl.ncclCommShrink(communicator, &dead, 1, &child, nullptr, kNcclShrinkAbort);
    ASSERT_NE(settled_child(rank, communicator, result, &child), nullptr);
    EXPECT_TRUE(rank.finish());
    int count = 0;
    EXPECT_EQ(rank.nccl.ncclCommCount(child, &count), ncclSuccess);
    EXPECT_EQ(count, 2);
    expect_broadcast_works(rank, child, 1);
    EXPECT_EQ(rank.nccl.ncclCommDestroy(child), ncclSuccess);
    EXPECT_EQ(rank.nccl.ncclCommAbort(communicator), ncclSuccess);
  });
  EXPECT_EQ(ranks.process(0).join(), 0);
  EXPECT_EQ(ranks.process(1).join(), -SIGKILL);
  EXPECT_EQ(ranks.process(2).join(), 0);
}

TEST_F(NcclDoubleInit, AbortOfTheParentEndsASplitThatHangs) {
  Ranks ranks(Environment{{"FASTSYNC_FAKE_NCCL_PEER_LOSS", "hang"}});
  ranks.add_all(2, [&](Rank& rank) {
    ncclComm_t communicator = rank.join(2, ranks.share_id(rank, 2));
    ncclComm_t child = nullptr;
    if (rank.rank() == 0) {  // the other never splits
      EXPECT_EQ(rank.nccl.ncclCommSplit(communicator, 0, 0, &child, nullptr), ncclInProgress);
      EXPECT_FALSE(comes_true([&] { return rank.state(communicator) != ncclInProgress; }, kClearlyHanging));
    }
    EXPECT_EQ(rank.nccl.ncclCommAbort(communicator), ncclSuccess);
    EXPECT_EQ(child, nullptr);
    EXPECT_EQ(rank.nccl.live("communicator"), 0);
  });
  ranks.join_all();
}

// --- The fault plan ---------------------------------------------------------------------------------------------------

TEST_F(NcclDoubleInit, FailsTheCallThatThePlanNames) {
  Ranks ranks(Environment{{"FASTSYNC_FAKE_FAULTS", "symbol=ncclGetUniqueId nth=2 action=fail code=2"}});
  ranks.add(0, 0, [&](Rank& rank) {
    ncclUniqueId id{};
    EXPECT_EQ(rank.nccl.ncclGetUniqueId(&id), ncclSuccess);
    EXPECT_EQ(rank.nccl.ncclGetUniqueId(&id), ncclSystemError);
    EXPECT_NE(rank.last_error().find("ncclGetUniqueId"), std::string::npos);
    EXPECT_EQ(rank.nccl.ncclGetUniqueId(&id), ncclSuccess);
    EXPECT_EQ(rank.nccl.count("ncclGetUniqueId"), 3U);
  });
  ranks.join_all();
}

TEST_F(NcclDoubleInit, HangsFailsOrDelaysTheInitialization) {
  const auto started = [](Ranks& ranks, Rank& rank) { return rank.start(1, ranks.share_id(rank, 1)); };
  Ranks hanging(Environment{{"FASTSYNC_FAKE_FAULTS", "symbol=ncclCommInitRankConfig action=hang"}});
  hanging.add(0, 0, [&](Rank& rank) {
    ncclComm_t communicator = started(hanging, rank);
    EXPECT_FALSE(comes_true([&] { return rank.state(communicator) != ncclInProgress; }, kClearlyHanging));
    EXPECT_EQ(rank.nccl.ncclCommAbort(communicator), ncclSuccess);
  });
  hanging.join_all();
  Ranks failing(Environment{{"FASTSYNC_FAKE_FAULTS", "symbol=ncclCommInitRankConfig action=fail_later code=6"}});
  failing.add(0, 0, [&](Rank& rank) {
    ncclComm_t communicator = started(failing, rank);
    EXPECT_EQ(rank.settled(communicator), ncclRemoteError);
    EXPECT_EQ(rank.nccl.ncclCommAbort(communicator), ncclSuccess);
  });
  failing.join_all();
  Ranks late(Environment{{"FASTSYNC_FAKE_FAULTS", "symbol=ncclCommInitRankConfig action=delay ms=200"}});
  late.add(0, 0, [&](Rank& rank) {
    const auto begin = std::chrono::steady_clock::now();
    ncclComm_t communicator = started(late, rank);
    EXPECT_EQ(rank.settled(communicator), ncclSuccess);
    EXPECT_GE(std::chrono::steady_clock::now() - begin, 200ms);
    EXPECT_EQ(rank.nccl.ncclCommDestroy(communicator), ncclSuccess);
  });
  late.join_all();
}

TEST_F(NcclDoubleInit, HangsFailsOrCorruptsAnOperation) {
  Ranks ranks(Environment{{"FASTSYNC_FAKE_FAULTS",
                           "rank=1 symbol=ncclBroadcast nth=2 action=corrupt bytes=3; "
                           "rank=1 symbol=ncclBroadcast nth=3 action=hang"},
                          {"FASTSYNC_FAKE_NCCL_PEER_LOSS", "hang"}});
  ranks.add_all(2, [&](Rank& rank) {
    ncclComm_t communicator = rank.join(2, ranks.share_id(rank, 2));
    expect_broadcast_works(rank, communicator, 0);
    void* memory = rank.buffer(pattern(2000, static_cast<std::uint64_t>(rank.rank())));
    ASSERT_EQ(rank.broadcast(memory, memory, 2000, 0, communicator), ncclSuccess);
    ASSERT_TRUE(rank.finish());
    const auto got = rank.bytes(memory, 2000);
    const auto sent = pattern(2000, 0);
    int different = 0;
    for (std::size_t i = 0; i < sent.size(); ++i) different += got[i] != sent[i] ? 1 : 0;
    EXPECT_EQ(different, rank.rank() == 1 ? 3 : 0);
    ASSERT_EQ(rank.broadcast(memory, memory, 2000, 0, communicator), ncclSuccess);
    EXPECT_FALSE(comes_true([&] { return rank.idle(); }, kClearlyHanging));
    EXPECT_EQ(rank.nccl.ncclCommAbort(communicator), ncclSuccess);
    EXPECT_TRUE(rank.finish());
  });
  ranks.join_all();
  Ranks failing(Environment{{"FASTSYNC_FAKE_FAULTS", "symbol=ncclBroadcast action=fail_later code=1"}});
  failing.add(0, 0, [&](Rank& rank) {
    ncclComm_t communicator = rank.join(1, failing.share_id(rank, 1));
    void* memory = rank.buffer(100);
    (void)rank.nccl.ncclBroadcast(memory, memory, 100, ncclUint8, 0, communicator, rank.stream);
    EXPECT_TRUE(comes_true([&] { return rank.state(communicator) == ncclUnhandledCudaError; }));
    EXPECT_EQ(rank.nccl.ncclCommAbort(communicator), ncclSuccess);
  });
  failing.join_all();
}

}  // namespace
}  // namespace fastsync::testing::nccl

// The double of NCCL keeps NCCL's rules: what moves, what hangs, what is refused, and what ends a hang.
#include <gtest/gtest.h>

#include <algorithm>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

#include "doubles/nccl_rank.h"

namespace fastsync::testing::nccl {
namespace {

using namespace std::chrono_literals;

// Long enough that a call that does not hang would have ended.
constexpr std::chrono::milliseconds kClearlyHanging{300};

class NcclDouble : public ::testing::Test {
 protected:
  void SetUp() override {
    if (fake_cuda_path() == nullptr || fake_nccl_path() == nullptr) GTEST_SKIP() << "the doubles were not built";
  }
};

bool hangs(const Rank& rank) {
  return !comes_true([&] { return rank.idle(); }, kClearlyHanging);
}

// --- What moves -------------------------------------------------------------------------------------------------------

class NcclDoubleBroadcast : public NcclDouble, public ::testing::WithParamInterface<std::tuple<int, bool>> {};

TEST_P(NcclDoubleBroadcast, GivesAllRanksTheBytesOfTheRoot) {
  const auto [nranks, in_place] = GetParam();
  Ranks ranks(Environment{{"FASTSYNC_FAKE_DELAY_US", "3000"}, {"FASTSYNC_FAKE_NCCL_CHUNK_DELAY_US", "300"}});
  ranks.add_all(nranks, [&, nranks = nranks, in_place = in_place](Rank& rank) {
    ncclComm_t communicator = rank.join(nranks, ranks.share_id(rank, nranks));
    constexpr std::size_t kBytes = 5 * 1024 * 1024 + 3;
    void* source = rank.buffer(kBytes);
    void* target = in_place ? source : rank.buffer(kBytes);
    for (int round = 0; round < 6; ++round) {
      const int root = round % nranks;
      const auto expected = pattern(kBytes, static_cast<std::uint64_t>(round));
      const auto mine = rank.rank() == root ? expected : pattern(kBytes, 99);
      ASSERT_EQ(rank.cuda.upload(reinterpret_cast<CUdeviceptr>(source), mine.data(), kBytes), CUDA_SUCCESS);
      ASSERT_EQ(rank.broadcast(source, target, kBytes, root, communicator), ncclSuccess) << rank.last_error();
      ASSERT_TRUE(rank.finish());
      ASSERT_TRUE(same(rank.bytes(target, kBytes), expected)) << "round " << round;
    }
    EXPECT_EQ(rank.nccl.ncclCommDestroy(communicator), ncclSuccess);
    EXPECT_EQ(rank.violations(), "");
  });
  ranks.join_all();
}
INSTANTIATE_TEST_SUITE_P(All, NcclDoubleBroadcast, ::testing::Combine(::testing::Values(2, 3), ::testing::Bool()));

TEST_F(NcclDouble, GathersInTheOrderOfTheRanks) {
  Ranks ranks;
  ranks.add_all(3, [&](Rank& rank) {
    ncclComm_t communicator = rank.join(3, ranks.share_id(rank, 3));
    constexpr std::size_t kFloats = 300'000;
    void* source = rank.buffer(pattern(4 * kFloats, static_cast<std::uint64_t>(rank.rank())));
    void* target = rank.buffer(3 * 4 * kFloats);
    (void)rank.nccl.ncclAllGather(source, target, kFloats, ncclFloat32, communicator, rank.stream);
    ASSERT_EQ(rank.settled(communicator), ncclSuccess);
    ASSERT_TRUE(rank.finish());
    for (std::size_t part = 0; part < 3; ++part) {
      EXPECT_TRUE(same(rank.bytes(static_cast<std::byte*>(target) + part * 4 * kFloats, 4 * kFloats),
                       pattern(4 * kFloats, part)));
    }
    EXPECT_EQ(rank.nccl.ncclCommDestroy(communicator), ncclSuccess);
  });
  ranks.join_all();
}

TEST_F(NcclDouble, CountsInElementsOfTheType) {
  Ranks ranks;
  ranks.add_all(2, [&](Rank& rank) {
    ncclComm_t communicator = rank.join(2, ranks.share_id(rank, 2));
    const std::tuple<ncclDataType_t, std::size_t> types[] = {{ncclInt8, 1},     {ncclUint8, 1},   {ncclFloat16, 2},
                                                             {ncclBfloat16, 2}, {ncclInt32, 4},   {ncclFloat32, 4},
                                                             {ncclInt64, 8},    {ncclFloat64, 8}, {ncclFloat8e5m2, 1}};
    for (const auto& [type, size] : types) {
      const auto before = pattern(64, 10);
      void* memory = rank.buffer(rank.rank() == 0 ? pattern(64, 20) : before);
      (void)rank.nccl.ncclBroadcast(memory, memory, 5, type, 0, communicator, rank.stream);
      ASSERT_EQ(rank.settled(communicator), ncclSuccess);
      ASSERT_TRUE(rank.finish());
      auto expected = rank.rank() == 0 ? pattern(64, 20) : before;
      const auto sent = pattern(64, 20);
      std::copy_n(sent.begin(), 5 * size, expected.begin());
      EXPECT_TRUE(rank.bytes(memory, 64) == expected) << "type " << type;
    }
    EXPECT_EQ(rank.nccl.ncclCommDestroy(communicator), ncclSuccess);
  });
  ranks.join_all();
}

TEST_F(NcclDouble, ReturnsBeforeTheOtherRanksHaveCalled) {
  Ranks ranks;
  const Signal called;
  ranks.add_all(2, [&](Rank& rank) {
    ncclComm_t communicator = rank.join(2, ranks.share_id(rank, 2));
    void* memory = rank.buffer(1000);
    if (rank.rank() == 1) called.take();
    EXPECT_EQ(rank.broadcast(memory, memory, 1000, 0, communicator), ncclSuccess);
    if (rank.rank() == 0) {
      EXPECT_FALSE(rank.idle());
      called.give();
    }
    EXPECT_TRUE(rank.finish());
    EXPECT_EQ(rank.nccl.ncclCommDestroy(communicator), ncclSuccess);
  });
  ranks.join_all();
}

TEST_F(NcclDouble, KeepsTheOrderOfLaunchesAcrossStreams) {
  Ranks ranks(Environment{{"FASTSYNC_FAKE_DELAY_US", "2000"}});
  ranks.add_all(2, [&](Rank& rank) {
    ncclComm_t communicator = rank.join(2, ranks.share_id(rank, 2));
    CUstream other = rank.new_stream();
    constexpr std::size_t kBytes = 1000;
    std::vector<void*> buffers;
    for (std::uint64_t i = 0; i < 20; ++i) {
      buffers.push_back(rank.buffer(pattern(kBytes + i, rank.rank() == 0 ? i : 99)));
      // The ranks alternate in opposite ways: only the order of the calls is common.
      CUstream stream = (i % 2 == 0) == (rank.rank() == 0) ? rank.stream : other;
      (void)rank.nccl.ncclBroadcast(buffers[i], buffers[i], kBytes + i, ncclUint8, 0, communicator, stream);
      ASSERT_EQ(rank.settled(communicator), ncclSuccess);
    }
    ASSERT_TRUE(rank.finish());
    ASSERT_EQ(rank.cuda.synchronize(other), CUDA_SUCCESS);
    for (std::uint64_t i = 0; i < 20; ++i)
      EXPECT_TRUE(same(rank.bytes(buffers[i], kBytes + i), pattern(kBytes + i, i)));
    EXPECT_EQ(rank.nccl.ncclCommDestroy(communicator), ncclSuccess);
  });
  ranks.join_all();
}

TEST_F(NcclDouble, MovesSendsAndReceivesOfAGroupTogether) {
  Ranks ranks;
  ranks.add_all(3, [&](Rank& rank) {
    ncclComm_t communicator = rank.join(3, ranks.share_id(rank, 3));
    constexpr std::size_t kBytes = 3 * 1024 * 1024;
    const auto me = static_cast<std::uint64_t>(rank.rank());
    std::vector<void*> received;
    ASSERT_EQ(rank.nccl.ncclGroupStart(), ncclSuccess);
    for (std::uint64_t peer = 0; peer < 3; ++peer) {  // itself too
      void* sent = rank.buffer(pattern(kBytes, 10 * me + peer));
      received.push_back(rank.buffer(kBytes));
      const int other = static_cast<int>(peer);
      ASSERT_EQ(rank.nccl.ncclSend(sent, kBytes, ncclUint8, other, communicator, rank.stream), ncclSuccess);
      ASSERT_EQ(rank.nccl.ncclRecv(received[peer], kBytes, ncclUint8, other, communicator, rank.stream), ncclSuccess);
    }
    (void)rank.nccl.ncclGroupEnd();
    ASSERT_EQ(rank.settled(communicator), ncclSuccess);
    ASSERT_TRUE(rank.finish());
    for (std::uint64_t peer = 0; peer < 3; ++peer) {
      EXPECT_TRUE(same(rank.bytes(received[peer], kBytes), pattern(kBytes, 10 * peer + me)));
    }
    EXPECT_EQ(rank.nccl.ncclCommDestroy(communicator), ncclSuccess);
  });
  ranks.join_all();
}

TEST_F(NcclDouble, HoldsAllStreamsOfAGroupUntilItIsDone) {
  Ranks ranks;
  const Signal called;
  ranks.add_all(2, [&](Rank& rank) {
    ncclComm_t communicator = rank.join(2, ranks.share_id(rank, 2));
    CUstream other = rank.new_stream();
    void* one = rank.buffer(pattern(1000, static_cast<std::uint64_t>(rank.rank())));
    void* two = rank.buffer(pattern(2000, static_cast<std::uint64_t>(rank.rank())));
    if (rank.rank() == 1) called.take();
    ASSERT_EQ(rank.nccl.ncclGroupStart(), ncclSuccess);
    ASSERT_EQ(rank.nccl.ncclBroadcast(one, one, 1000, ncclUint8, 0, communicator, rank.stream), ncclSuccess);
    ASSERT_EQ(rank.nccl.ncclBroadcast(two, two, 2000, ncclUint8, 1, communicator, other), ncclSuccess);
    EXPECT_TRUE(rank.idle()) << "nothing is queued before the group ends";
    (void)rank.nccl.ncclGroupEnd();
    ASSERT_EQ(rank.settled(communicator), ncclSuccess);
    if (rank.rank() == 0) {
      EXPECT_TRUE(hangs(rank));
      EXPECT_EQ(rank.cuda.query(other), CUDA_ERROR_NOT_READY);
      called.give();
    }
    ASSERT_TRUE(rank.finish());
    ASSERT_TRUE(comes_true([&] { return rank.cuda.query(other) == CUDA_SUCCESS; }));
    EXPECT_TRUE(rank.bytes(one, 1000) == pattern(1000, 0));
    EXPECT_TRUE(rank.bytes(two, 2000) == pattern(2000, 1));
    EXPECT_EQ(rank.nccl.ncclCommDestroy(communicator), ncclSuccess);
  });
  ranks.join_all();
}

TEST_F(NcclDouble, HangsWhenTwoRanksSendToEachOtherOutsideOfAGroup) {
  Ranks ranks(Environment{{"FASTSYNC_FAKE_NCCL_PEER_LOSS", "hang"}});
  ranks.add_all(2, [&](Rank& rank) {
    ncclComm_t communicator = rank.join(2, ranks.share_id(rank, 2));
    const int peer = 1 - rank.rank();
    void* memory = rank.buffer(100);
    (void)rank.nccl.ncclSend(memory, 100, ncclUint8, peer, communicator, rank.stream);
    ASSERT_EQ(rank.settled(communicator), ncclSuccess);
    (void)rank.nccl.ncclRecv(memory, 100, ncclUint8, peer, communicator, rank.stream);
    ASSERT_EQ(rank.settled(communicator), ncclSuccess);
    EXPECT_TRUE(hangs(rank));
    EXPECT_EQ(rank.nccl.ncclCommAbort(communicator), ncclSuccess);
    EXPECT_TRUE(rank.finish());
  });
  ranks.join_all();
}

TEST_F(NcclDouble, RefusesASendToItselfThatNothingReceives) {
  Ranks ranks;
  ranks.add(0, 0, [&](Rank& rank) {
    ncclComm_t communicator = nullptr;
    ncclUniqueId id = ranks.share_id(rank, 1);
    ASSERT_EQ(rank.nccl.ncclCommInitRank(&communicator, 1, id, 0), ncclSuccess);
    void* memory = rank.buffer(100);
    EXPECT_EQ(rank.nccl.ncclSend(memory, 100, ncclUint8, 0, communicator, rank.stream), ncclInvalidUsage);
    EXPECT_EQ(rank.nccl.ncclCommDestroy(communicator), ncclSuccess);
  });
  ranks.join_all();
}

TEST_F(NcclDouble, BroadcastsItsOwnMemoryWhichLegacyIpcRefuses) {
  Ranks ranks;
  ranks.add_all(2, [&](Rank& rank) {
    ncclComm_t communicator = rank.join(2, ranks.share_id(rank, 2));
    void* memory = nullptr;
    ASSERT_EQ(rank.nccl.ncclMemAlloc(&memory, 100'000), ncclSuccess) << rank.last_error();
    void* handle = nullptr;
    ASSERT_EQ(rank.nccl.ncclCommRegister(communicator, memory, 100'000, &handle), ncclSuccess);
    const auto mine = pattern(100'000, static_cast<std::uint64_t>(rank.rank()));
    ASSERT_EQ(rank.cuda.upload(reinterpret_cast<CUdeviceptr>(memory), mine.data(), mine.size()), CUDA_SUCCESS);
    ASSERT_EQ(rank.broadcast(memory, memory, 100'000, 1, communicator), ncclSuccess);
    ASSERT_TRUE(rank.finish());
    EXPECT_TRUE(same(rank.bytes(memory, 100'000), pattern(100'000, 1)));
    CUipcMemHandle legacy;
    EXPECT_NE(rank.cuda.export_memory(&legacy, reinterpret_cast<CUdeviceptr>(memory)), CUDA_SUCCESS);
    EXPECT_EQ(rank.nccl.ncclCommDeregister(communicator, handle), ncclSuccess);
    EXPECT_EQ(rank.nccl.ncclCommDeregister(communicator, handle), ncclInvalidArgument);
    EXPECT_EQ(rank.nccl.ncclMemFree(memory), ncclSuccess);
    EXPECT_EQ(rank.nccl.live("memory"), 0);
    EXPECT_EQ(rank.nccl.ncclCommDestroy(communicator), ncclSuccess);
  });
  ranks.join_all();
}

// --- What hangs, and what ends it -------------------------------------------------------------------------------------

struct Disagreement {
  const char* name;
  // Queues what this rank has queued; differs between the ranks.
  void (*call)(const Rank&, void* memory, ncclComm_t);
  const char* text;  // part of the diagnosis
};

void PrintTo(const Disagreement& one, std::ostream* out) { *out << one.name; }  // NOLINT: GoogleTest's name

const Disagreement kDisagreements[] = {
    {"size",
     [](const Rank& rank, void* memory, ncclComm_t communicator) {
       const std::size_t count = rank.rank() == 0 ? 1000 : 1001;
       (void)rank.nccl.ncclBroadcast(memory, memory, count, ncclUint8, 0, communicator, rank.stream);
     },
     "count 1001"},
    {"type",
     [](const Rank& rank, void* memory, ncclComm_t communicator) {
       const ncclDataType_t type = rank.rank() == 0 ? ncclFloat16 : ncclBfloat16;
       (void)rank.nccl.ncclBroadcast(memory, memory, 500, type, 0, communicator, rank.stream);
     },
     "type 9"},
    {"root",
     [](const Rank& rank, void* memory, ncclComm_t communicator) {
       (void)rank.nccl.ncclBroadcast(memory, memory, 1000, ncclUint8, rank.rank(), communicator, rank.stream);
     },
     "root 1"},
    {"kind",
     [](const Rank& rank, void* memory, ncclComm_t communicator) {
       if (rank.rank() == 0) {
         (void)rank.nccl.ncclBroadcast(memory, memory, 1000, ncclUint8, 0, communicator, rank.stream);
       } else {
         (void)rank.nccl.ncclAllGather(memory, memory, 1000, ncclUint8, communicator, rank.stream);
       }
     },
     "ncclAllGather"},
    {"pair",
     [](const Rank& rank, void* memory, ncclComm_t communicator) {
       if (rank.rank() == 0) {
         (void)rank.nccl.ncclBroadcast(memory, memory, 1000, ncclUint8, 0, communicator, rank.stream);
       } else {
         (void)rank.nccl.ncclRecv(memory, 1000, ncclUint8, 0, communicator, rank.stream);
       }
     },
     "ncclRecv"},
    {"sendsize",
     [](const Rank& rank, void* memory, ncclComm_t communicator) {
       if (rank.rank() == 0) {
         (void)rank.nccl.ncclSend(memory, 1000, ncclUint8, 1, communicator, rank.stream);
       } else {
         (void)rank.nccl.ncclRecv(memory, 900, ncclUint8, 0, communicator, rank.stream);
       }
     },
     "900"},
};

class NcclDoubleMismatch : public NcclDouble, public ::testing::WithParamInterface<Disagreement> {};

TEST_P(NcclDoubleMismatch, HangsUntilTheRanksAbort) {
  Ranks ranks(Environment{{"FASTSYNC_FAKE_NCCL_PEER_LOSS", "hang"}});  // the other's abort is none of this
  ranks.add_all(2, [&](Rank& rank) {
    ncclComm_t communicator = rank.join(2, ranks.share_id(rank, 2));
    void* memory = rank.buffer(4096);
    GetParam().call(rank, memory, communicator);
    EXPECT_EQ(rank.settled(communicator), ncclSuccess);
    EXPECT_TRUE(hangs(rank));
    EXPECT_EQ(rank.state(communicator), ncclSuccess);
    EXPECT_EQ(rank.nccl.ncclCommAbort(communicator), ncclSuccess);
    EXPECT_TRUE(rank.finish());
    EXPECT_NE(rank.violations().find("mismatch"), std::string::npos);
    // The stream goes on.
    EXPECT_EQ(rank.cuda.synchronize(rank.stream), CUDA_SUCCESS);
  });
  ranks.join_all();
}

TEST_P(NcclDoubleMismatch, IsNamedWhereDiagnosisIsAskedFor) {
  Ranks ranks(Environment{{"FASTSYNC_FAKE_NCCL_DIAGNOSE", "1"}, {"FASTSYNC_FAKE_NCCL_PEER_LOSS", "hang"}});
  ranks.add_all(2, [&](Rank& rank) {
    ncclComm_t communicator = rank.join(2, ranks.share_id(rank, 2));
    void* memory = rank.buffer(4096);
    GetParam().call(rank, memory, communicator);
    EXPECT_TRUE(comes_true([&] { return rank.state(communicator) == ncclInvalidUsage; }));
    EXPECT_TRUE(rank.finish());
    EXPECT_NE(rank.last_error().find(GetParam().text), std::string::npos) << rank.last_error();
    EXPECT_EQ(rank.nccl.ncclCommAbort(communicator), ncclSuccess);
  });
  ranks.join_all();
}
INSTANTIATE_TEST_SUITE_P(All, NcclDoubleMismatch, ::testing::ValuesIn(kDisagreements),
                         [](const auto& one) { return std::string(one.param.name); });

TEST_F(NcclDouble, RefusesEveryCallAfterAbort) {
  Ranks ranks(Environment{{"FASTSYNC_FAKE_NCCL_PEER_LOSS", "hang"}});
  ranks.add_all(2, [&](Rank& rank) {
    ncclComm_t communicator = rank.join(2, ranks.share_id(rank, 2));
    void* memory = rank.buffer(100);
    EXPECT_EQ(rank.nccl.ncclCommAbort(communicator), ncclSuccess);
    ncclResult_t state = ncclSuccess;
    int count = 0;
    EXPECT_EQ(rank.nccl.ncclBroadcast(memory, memory, 100, ncclUint8, 0, communicator, rank.stream),
              ncclInvalidArgument);
    EXPECT_EQ(rank.nccl.ncclCommGetAsyncError(communicator, &state), ncclInvalidArgument);
    EXPECT_EQ(rank.nccl.ncclCommCount(communicator, &count), ncclInvalidArgument);
    EXPECT_EQ(rank.nccl.ncclCommDestroy(communicator), ncclInvalidArgument);
    EXPECT_NE(rank.violations().find("use-after-destroy"), std::string::npos);
  });
  ranks.join_all();
}

TEST_F(NcclDouble, ReportsAKilledPeerAndHangsUntilAbort) {
  Ranks ranks(Environment{{"FASTSYNC_FAKE_FAULTS", "rank=1 symbol=ncclBroadcast nth=2 action=kill"}});
  const Signal worked;
  const auto body = [&](Rank& rank) {
    ncclComm_t communicator = rank.join(2, ranks.share_id(rank, 2));
    void* memory = rank.buffer(1000);
    ASSERT_EQ(rank.broadcast(memory, memory, 1000, 0, communicator), ncclSuccess);
    ASSERT_TRUE(rank.finish());
    rank.rank() == 0 ? worked.give() : worked.take();
    (void)rank.broadcast(memory, memory, 1000, 0, communicator);
    EXPECT_TRUE(comes_true([&] { return rank.state(communicator) == ncclRemoteError; }));
    EXPECT_NE(rank.last_error().find("rank 1"), std::string::npos) << rank.last_error();
    EXPECT_TRUE(hangs(rank));
    EXPECT_EQ(rank.nccl.ncclCommDestroy(communicator), ncclRemoteError) << "only abort ends a broken communicator";
    EXPECT_EQ(rank.nccl.ncclCommAbort(communicator), ncclSuccess);
    EXPECT_TRUE(rank.finish());
  };
  ranks.add_all(2, body);
  EXPECT_EQ(ranks.process(0).join(), 0);
  EXPECT_EQ(ranks.process(1).join(), -SIGKILL);
}

TEST_F(NcclDouble, NoticesNoDeathWhereThatIsAskedFor) {
  Ranks ranks(Environment{{"FASTSYNC_FAKE_FAULTS", "rank=1 symbol=ncclBroadcast action=kill"},
                          {"FASTSYNC_FAKE_NCCL_PEER_LOSS", "hang"}});
  ranks.add_all(2, [&](Rank& rank) {
    ncclComm_t communicator = rank.join(2, ranks.share_id(rank, 2));
    void* memory = rank.buffer(1000);
    (void)rank.broadcast(memory, memory, 1000, 0, communicator);
    EXPECT_TRUE(hangs(rank));
    EXPECT_EQ(rank.state(communicator), ncclSuccess);
    EXPECT_EQ(rank.nccl.ncclCommAbort(communicator), ncclSuccess);
    EXPECT_TRUE(rank.finish());
  });
  EXPECT_EQ(ranks.process(0).join(), 0);
  EXPECT_EQ(ranks.process(1).join(), -SIGKILL);
}

TEST_F(NcclDouble, DestroysOnlyTogether) {
  Ranks ranks;
  const Signal hanging;
  ranks.add_all(2, [&](Rank& rank) {
    ncclComm_t communicator = rank.join(2, ranks.share_id(rank, 2));
    if (rank.rank() == 0) {
      EXPECT_EQ(rank.nccl.ncclCommFinalize(communicator), ncclInProgress);
      EXPECT_FALSE(comes_true([&] { return rank.state(communicator) != ncclInProgress; }, kClearlyHanging));
      hanging.give();
      EXPECT_EQ(rank.settled(communicator), ncclSuccess);
    } else {
      hanging.take();
    }
    EXPECT_EQ(rank.nccl.ncclCommDestroy(communicator), ncclSuccess);
  });
  ranks.join_all();
}

TEST_F(NcclDouble, RevokeEndsWhatIsInFlight) {
  Ranks ranks(Environment{{"FASTSYNC_FAKE_NCCL_PEER_LOSS", "hang"}});
  ranks.add_all(2, [&](Rank& rank) {
    ncclComm_t communicator = rank.join(2, ranks.share_id(rank, 2));
    void* memory = rank.buffer(1000);
    const std::size_t count = rank.rank() == 0 ? 1000 : 999;
    ASSERT_EQ(rank.broadcast(memory, memory, count, 0, communicator), ncclSuccess);
    EXPECT_TRUE(hangs(rank));
    EXPECT_EQ(rank.nccl.ncclCommRevoke(communicator, 0), ncclSuccess);
    EXPECT_TRUE(rank.finish());
    EXPECT_EQ(rank.broadcast(memory, memory, 1000, 0, communicator), ncclInvalidUsage);
    EXPECT_EQ(rank.nccl.ncclCommAbort(communicator), ncclSuccess);
  });
  ranks.join_all();
}

// --- Leaks ------------------------------------------------------------------------------------------------------------

TEST_F(NcclDouble, LeavesNoThreadDescriptorOrObjectBehind) {
  constexpr int kRounds = 20;
  Ranks ranks(Environment{{"FASTSYNC_FAKE_NCCL_PEER_LOSS", "hang"}});
  ranks.add_all(2, [&](Rank& rank) {
    void* memory = rank.buffer(4096);
    int descriptors = 0;
    int threads = 0;
    for (int round = 0; round < kRounds; ++round) {
      ncclComm_t communicator = rank.join(2, ranks.share_id(rank, 2));
      const bool aborts = round % 2 == 1;
      const std::size_t count = aborts ? static_cast<std::size_t>(100 + rank.rank()) : 4096;
      ASSERT_EQ(rank.broadcast(memory, memory, count, 0, communicator), ncclSuccess);
      if (aborts) {
        ASSERT_EQ(rank.nccl.ncclCommAbort(communicator), ncclSuccess);
        ASSERT_TRUE(rank.finish());
      } else {
        ASSERT_TRUE(rank.finish());
        ASSERT_EQ(rank.nccl.ncclCommDestroy(communicator), ncclSuccess);
      }
      if (round == 1) {
        descriptors = open_descriptors();
        threads = running_threads();
      }
    }
    EXPECT_TRUE(comes_true([&] { return rank.nccl.live("operation") == 0; }));
    EXPECT_TRUE(comes_true([&] { return rank.nccl.live("communicator") == 0; }));
    EXPECT_EQ(rank.nccl.live("rendezvous"), 0);
    EXPECT_EQ(open_descriptors(), descriptors);
    EXPECT_TRUE(comes_true([&] { return running_threads() == threads; }, 5s));
  });
  ranks.join_all();
}

}  // namespace
}  // namespace fastsync::testing::nccl

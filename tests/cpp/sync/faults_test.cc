// Syncs that fail: every rank learns why and about whom, at once or at its deadline, and the next sync works.
#include <tuple>

#include "group.h"

namespace fastsync::testing {
namespace {

using namespace std::chrono_literals;

// What the slowest of these tests waits for on purpose.
constexpr std::chrono::milliseconds kShortTimeout{FASTSYNC_SANITIZED != 0 ? 1200 : 500};

// Lets one thread go on when another says so.
class Gate {
 public:
  void open() { opened_.set_value(); }
  void pass() const { await(future_); }

 private:
  std::promise<void> opened_;
  std::shared_future<void> future_ = opened_.get_future().share();
};

std::string name_of(const char* transport, Step step) {
  std::ostringstream out;
  out << transport << step;
  return out.str();
}

// --- a rank fails ---------------------------------------------------------------------------------------------------

class RankFails : public ::testing::TestWithParam<std::tuple<const char*, Step>> {
 protected:
  [[nodiscard]] const char* transport() const { return std::get<0>(GetParam()); }
  [[nodiscard]] Step step() const { return std::get<1>(GetParam()); }
  // Raises at the step, in the middle of the buckets where there are several.
  [[nodiscard]] At failing() {
    return [this](Step at, std::size_t count) {
      if (at != step() || (at == Step::kBucket && count != 3)) return;
      raised_ = Clock::now();
      throw UserError("the loader raised at layer 3");
    };
  }
  void expect_told(const Outcome& outcome, int failed_rank) {
    EXPECT_EQ(outcome.kind, ErrorKind::kPeerFailed) << outcome;
    EXPECT_EQ(outcome.rank, failed_rank) << outcome;
    EXPECT_EQ(outcome.message, "the loader raised at layer 3");
    EXPECT_LT(outcome.when - raised_.load(), kAtOnce);
  }
  std::atomic<Clock::time_point> raised_{};
};

TEST_P(RankFails, ReceiverAndEveryoneElseKnowsAtOnce) {
  Group group(transport(), 3);
  group.sync_again(5);
  Weights weights = some_weights(1);
  std::vector<Destinations> into(3, Destinations::like(weights));
  auto first = group.start_receiver(0, {.into = &into[0]});
  auto failing_rank = group.start_receiver(1, {.into = &into[1], .pull = true, .at = failing()});
  auto last = group.start_receiver(2, {.into = &into[2], .pull = true});
  expect_told(get(group.start_source({.weights = &weights})), receiver_rank(1));
  expect_told(get(std::move(first)), receiver_rank(1));
  expect_told(get(std::move(last)), receiver_rank(1));
  EXPECT_TRUE(get(std::move(failing_rank)).user_error);
  group.sync_again(6);
  group.sync_again(7);
}

TEST_P(RankFails, SourceAndEveryoneElseKnowsAtOnce) {
  Group group(transport(), 3);
  group.sync_again(5);
  Weights weights = some_weights(1);
  std::vector<Destinations> into(3, Destinations::like(weights));
  std::vector<std::future<Outcome>> got;
  for (int i = 0; i < 3; ++i)
    got.push_back(group.start_receiver(i, {.into = &into[static_cast<std::size_t>(i)], .pull = i == 1}));
  // kBound is a step of receivers only; the source then fails where it waits for them.
  SourceCall call{.weights = &weights, .streaming = true, .at = failing()};
  if (step() == Step::kBound)
    call.at = [&, fails = failing()](Step at, std::size_t) {
      if (at == Step::kReady) fails(Step::kBound, 0);
    };
  EXPECT_TRUE(get(group.start_source(call)).user_error);
  for (auto& outcome : got) expect_told(get(std::move(outcome)), kSource);
  group.sync_again(6);
  group.sync_again(7);
}

INSTANTIATE_TEST_SUITE_P(At, RankFails,
                         ::testing::Combine(::testing::Values("shm", "gloo", "ipc"),
                                            ::testing::Values(Step::kOpened, Step::kJoined, Step::kBound, Step::kReady,
                                                              Step::kBucket, Step::kMoved)),
                         [](const auto& one) { return name_of(std::get<0>(one.param), std::get<1>(one.param)); });

class Faults : public EveryTransport {};

TEST_P(Faults, AMisfitIsKnownEverywhereBeforeAByteIsWritten) {
  Group group(GetParam(), 3);
  Weights weights = some_weights(1);
  std::vector<Destinations> into(3, Destinations::like(weights));
  into[1].tensors["layer.3"].pop_back();
  std::vector<std::future<Outcome>> got;
  for (int i = 0; i < 3; ++i) got.push_back(group.start_receiver(i, {.into = &into[static_cast<std::size_t>(i)]}));
  std::vector<Outcome> outcomes{get(group.start_source({.weights = &weights}))};
  for (auto& outcome : got) outcomes.push_back(get(std::move(outcome)));
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.kind, ErrorKind::kManifestMismatch) << outcome;
    EXPECT_NE(outcome.message.find("'layer.3' uint8[5000] has a destination of 4999 bytes"), std::string::npos)
        << outcome;
    EXPECT_FALSE(outcome.wrote);
  }
  EXPECT_EQ(outcomes[0].rank, receiver_rank(1));
  EXPECT_EQ(outcomes[1].rank, receiver_rank(1));
  EXPECT_EQ(outcomes[3].rank, receiver_rank(1));
  for (Destinations& d : into) d.tensors.erase("layer.3");  // the one that was short
  for (const Destinations& d : into) EXPECT_TRUE(d.untouched());
  group.sync_again();
}

TEST_P(Faults, ABinderThatRaisesInAStreamIsKnownEverywhere) {
  Group group(GetParam(), 2);
  Weights weights = some_weights(1);
  auto into = Destinations::like(weights);
  auto also_into = Destinations::like(weights);
  into.at_bind = [](std::size_t first) {
    if (first > 2) throw UserError("no room");
  };
  auto a = group.start_receiver(0, {.into = &into});
  auto b = group.start_receiver(1, {.into = &also_into});
  const Outcome sent = get(group.start_source({.weights = &weights, .streaming = true}));
  EXPECT_EQ(sent.kind, ErrorKind::kPeerFailed) << sent;
  EXPECT_EQ(sent.rank, receiver_rank(0));
  EXPECT_TRUE(get(std::move(a)).user_error);
  EXPECT_EQ(get(std::move(b)).message, "no room");
  group.sync_again();
}

TEST_P(Faults, AHookThatRaisesEndsAnyWaitAndIsKnownEverywhere) {
  for (const bool at_source : {true, false}) {
    Group group(GetParam(), 2);
    Weights weights = some_weights(1);
    auto into = Destinations::like(weights);
    std::atomic<int> looks{0};
    const Wait::Hook interrupt = [&looks] {
      if (++looks > 3) throw UserError("interrupted");
    };
    // Receiver 1 does not come, so that the others wait.
    SourceCall call{.weights = &weights};
    ReceiverCall receive{.into = &into};
    (at_source ? call.hook : receive.hook) = interrupt;
    auto got = group.start_receiver(0, receive);
    const Outcome sent = get(group.start_source(call));
    const Outcome outcome = get(std::move(got));
    const Outcome& interrupted = at_source ? sent : outcome;
    const Outcome& told = at_source ? outcome : sent;
    EXPECT_TRUE(interrupted.user_error);
    EXPECT_EQ(told.kind, ErrorKind::kPeerFailed) << told;
    EXPECT_EQ(told.rank, at_source ? kSource : receiver_rank(0));
    // It hears of it in its own next call, and is then in step again.
    auto late_into = Destinations::like(weights);
    const auto start = Clock::now();
    const Outcome late = get(group.start_receiver(1, {.into = &late_into}));
    EXPECT_EQ(late.message, "interrupted") << late;
    EXPECT_LT(late.when - start, kAtOnce);
    group.sync_again();
  }
}

TEST_P(Faults, TheFirstOfSeveralFailuresIsTheOneThatEverybodySees) {
  Group group(GetParam(), 3);
  Weights weights = some_weights(1);
  std::vector<Destinations> into(3, Destinations::like(weights));
  std::vector<std::future<Outcome>> got;
  for (int i = 0; i < 3; ++i) {
    ReceiverCall call{.into = &into[static_cast<std::size_t>(i)]};
    call.at = [i](Step step, std::size_t) {
      if (step == Step::kJoined) throw UserError(concat("receiver ", i));
    };
    got.push_back(group.start_receiver(i, call));
  }
  const Outcome sent = get(group.start_source({.weights = &weights}));
  EXPECT_EQ(sent.kind, ErrorKind::kPeerFailed);
  EXPECT_EQ(sent.message, concat("receiver ", sent.rank - kFirstReceiver));
  for (auto& outcome : got) EXPECT_TRUE(get(std::move(outcome)).user_error);
  group.sync_again();
}

// --- a rank is late -------------------------------------------------------------------------------------------------

TEST_P(Faults, AReceiverThatWasLateForAFailedSyncIsToldAtOnceAndJoinsTheNext) {
  Group group(GetParam(), 2);
  Weights weights = some_weights(1);
  auto into = Destinations::like(weights);
  auto punctual = group.start_receiver(0, {.into = &into});
  SourceCall failing{.weights = &weights, .timeout = kShortTimeout};
  const Outcome sent = get(group.start_source(failing));
  EXPECT_EQ(sent.kind, ErrorKind::kTimeout) << sent;
  EXPECT_EQ(sent.rank, receiver_rank(1));
  EXPECT_EQ(get(std::move(punctual)).rank, receiver_rank(1));

  const auto start = Clock::now();
  const Outcome late = get(group.start_receiver(1, {.into = &into}));
  EXPECT_EQ(late.kind, ErrorKind::kTimeout) << late;
  EXPECT_EQ(late.rank, receiver_rank(1));
  EXPECT_LT(late.when - start, kAtOnce);
  group.sync_again();
}

// The same for one that had not even connected: it hears when the source is there again.
TEST_P(Faults, AReceiverThatHadNeverConnectedIsToldToo) {
  Group group(GetParam(), 2, false);
  group.connect(0);
  Weights weights = some_weights(1);
  auto into = Destinations::like(weights);
  auto punctual = group.start_receiver(0, {.into = &into});
  SourceCall failing{.weights = &weights, .timeout = kShortTimeout};
  EXPECT_EQ(get(group.start_source(failing)).rank, receiver_rank(1));
  EXPECT_EQ(get(std::move(punctual)).rank, receiver_rank(1));

  group.connect(1);
  Weights next_weights = some_weights(2);
  std::vector<Destinations> next_into(2, Destinations::like(next_weights));
  auto late = group.start_receiver(1, {.into = &next_into[1], .timeout = kLongTimeout / 3});
  auto next_punctual = group.start_receiver(0, {.into = &next_into[0]});
  SourceCall call{.weights = &next_weights};
  call.options.version = 2;
  auto sent = group.start_source(call);
  const Outcome told = get(std::move(late));
  EXPECT_EQ(told.kind, ErrorKind::kTimeout) << told;
  EXPECT_EQ(told.rank, receiver_rank(1)) << told;
  auto again = group.start_receiver(1, {.into = &next_into[1]});
  const Outcome next = get(std::move(sent));
  EXPECT_TRUE(next.ok) << next;
  EXPECT_TRUE(get(std::move(next_punctual)).ok);
  const Outcome joined = get(std::move(again));
  EXPECT_TRUE(joined.ok) << joined;
  EXPECT_TRUE(next_into[1].hold(next_weights));
}

// The same where its first call is over, by its own doing, before it can hear.
TEST_P(Faults, AReceiverThatHadNeverConnectedAndRefusesItsOwnCallIsInStep) {
  Group group(GetParam(), 2, false);
  group.connect(0);
  Weights weights = some_weights(1);
  auto into = Destinations::like(weights);
  auto punctual = group.start_receiver(0, {.into = &into});
  EXPECT_EQ(get(group.start_source({.weights = &weights, .timeout = kShortTimeout})).rank, receiver_rank(1));
  EXPECT_FALSE(get(std::move(punctual)).ok);

  group.connect(1);
  group.receiver(1).open(kLongTimeout, nullptr);
  group.receiver(1).announce();
  group.receiver(1).fail(ErrorKind::kInvalidArgument, receiver_rank(1), "bad destination");
  group.sync_again();
}

// The source refuses its own call as soon as everybody is connected, whether they have joined or not.
TEST_P(Faults, AReceiverThatConnectsDuringASyncThatFailsIsTold) {
  for (int round = 0; round < 30; ++round) {
    Group group(GetParam(), 1, false);
    Weights weights = some_weights(1);
    auto into = Destinations::like(weights);
    const At refuses = [](Step step, std::size_t) {
      if (step == Step::kOpened) throw UserError("bad version");
    };
    group.connect(0);
    auto sent = group.start_source({.weights = &weights, .at = refuses});
    // As often as not between the source's greeting and its failure, or after both.
    if (round % 2 == 0) {
      EXPECT_TRUE(get(std::move(sent)).user_error);
    }
    const auto start = Clock::now();
    const Outcome told = get(group.start_receiver(0, {.into = &into, .timeout = kLongTimeout / 3}));
    ASSERT_EQ(told.message, "bad version") << told;
    EXPECT_LT(told.when - start, kAtOnce * 2);
    if (sent.valid()) {
      EXPECT_TRUE(get(std::move(sent)).user_error);
    }
    group.sync_again();
  }
}

TEST_P(Faults, ASourceThatWaitedInVainWasAlone) {
  Group group(GetParam(), 2);
  Weights weights = some_weights(1);
  const Outcome sent = get(group.start_source({.weights = &weights, .timeout = kShortTimeout}));
  EXPECT_EQ(sent.kind, ErrorKind::kTimeout);
  EXPECT_NE(sent.message.find("ranks 20, 21 did not join"), std::string::npos) << sent.message;
  group.sync_again();  // the receivers' first call is not spent on it
}

TEST_P(Faults, AReceiverThatWaitedInVainWasAlone) {
  Group group(GetParam(), 2);
  Weights weights = some_weights(1);
  auto into = Destinations::like(weights);
  for (int round = 0; round < 2; ++round) {
    const auto start = Clock::now();
    const Outcome got = get(group.start_receiver(0, {.into = &into, .timeout = kShortTimeout}));
    EXPECT_EQ(got.kind, ErrorKind::kTimeout);
    EXPECT_EQ(got.rank, kSource);
    EXPECT_GE(got.when - start, kShortTimeout);
    EXPECT_LT(got.when - start, kShortTimeout + kAtOnce);
  }
  group.sync_again();
}

// --- calls that fail before the ranks have met: they must still pair up afterwards ------------------------------------

TEST_P(Faults, PairsCallsAgainAfterBothSidesRefusedOneOfTheirOwn) {
  Group group(GetParam(), 1);
  Weights weights = some_weights(1);
  auto into = Destinations::like(weights);
  const auto refusing = [](const char* why) {
    return [why](Step step, std::size_t) {
      if (step == Step::kOpened) throw UserError(why);
    };
  };
  // First sync: the receiver refuses its own destinations.
  auto got = group.start_receiver(0, {.into = &into, .at = refusing("bad destination")});
  EXPECT_EQ(get(group.start_source({.weights = &weights})).message, "bad destination");
  EXPECT_TRUE(get(std::move(got)).user_error);
  // Second: the source refuses its own version before the receiver calls. That call belongs to it.
  EXPECT_TRUE(get(group.start_source({.weights = &weights, .at = refusing("bad version")})).user_error);
  const Outcome told = get(group.start_receiver(0, {.into = &into, .timeout = kShortTimeout}));
  EXPECT_EQ(told.message, "bad version") << told;
  group.sync_again();
}

TEST_P(Faults, PairsCallsAgainAfterBothSidesFailedTheSameOneUnknownToEachOther) {
  Group group(GetParam(), 1);
  group.sync_again(3);  // both are connected
  WeightSender& sender = group.sender();
  WeightReceiver& receiver = group.receiver(0);
  // The source opens a sync, and does not look at its peers again before it fails.
  sender.open(kLongTimeout, nullptr);
  // Meanwhile the receiver's call fails too, and its next one begins before it can have heard of the source's failure.
  receiver.open(kLongTimeout, nullptr);
  receiver.announce();
  receiver.fail(ErrorKind::kInvalidArgument, receiver_rank(0), "bad destination");
  Weights weights = some_weights(1);
  auto into = Destinations::like(weights);
  Gate waits;
  std::atomic<bool> said{false};
  ReceiverCall call{.into = &into, .timeout = kLongTimeout / 3};
  call.hook = [&] {
    if (!said.exchange(true)) waits.open();
  };
  auto got = group.start_receiver(0, call);
  waits.pass();
  sender.fail(ErrorKind::kInvalidArgument, kSource, "bad version");
  // The two failures were one sync; the two calls that follow are the next.
  const Outcome sent = get(group.start_source({.weights = &weights, .timeout = kLongTimeout / 3}));
  EXPECT_TRUE(sent.ok) << sent;
  const Outcome outcome = get(std::move(got));
  EXPECT_TRUE(outcome.ok) << outcome;
  EXPECT_TRUE(into.hold(weights));
  group.sync_again();
}

TEST_P(Faults, PairsCallsAgainAfterAReceiverGaveUpJustAsTheSyncBegan) {
  if (GetParam() == std::string_view("ipc")) GTEST_SKIP() << "driven by hand, without a device";
  Group group(GetParam(), 1);
  WeightSender& sender = group.sender();
  Weights weights = some_weights(1);
  auto into = Destinations::like(weights);
  const auto plan = weights.plan(1024);
  auto given_up = group.start_receiver(0, {.into = &into, .timeout = kShortTimeout});
  sender.open(kLongTimeout, nullptr);
  (void)sender.join("auto", {GetParam()});
  EXPECT_EQ(get(std::move(given_up)).kind, ErrorKind::kTimeout);
  // Its next call has begun by the time that the source looks.
  Gate waits;
  std::atomic<bool> said{false};
  ReceiverCall call{.into = &into, .timeout = kLongTimeout / 3};
  call.hook = [&] {
    if (!said.exchange(true)) waits.open();
  };
  auto got = group.start_receiver(0, call);
  waits.pass();
  try {
    (void)sender.begin({.version = 1, .bucket_bytes = 1024}, plan, false);
    ADD_FAILURE() << "nobody was there to begin with";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kTimeout) << error.what();
    EXPECT_NE(std::string_view(error.what()).find("rank 20 gave up its call"), std::string_view::npos) << error.what();
    sender.fail(error.kind(), error.rank(), error.what());
  }
  const Outcome sent = get(group.start_source({.weights = &weights, .timeout = kLongTimeout / 3}));
  EXPECT_TRUE(sent.ok) << sent;
  const Outcome outcome = get(std::move(got));
  EXPECT_TRUE(outcome.ok) << outcome;
  EXPECT_TRUE(into.hold(weights));
}

TEST_P(Faults, PairsCallsAgainUnderRandomFailures) {
  std::mt19937_64 random(99);
  Group group(GetParam(), 2);
  for (int round = 0; round < 40; ++round) {
    Weights weights = some_weights(static_cast<std::uint64_t>(round));
    std::vector<Destinations> into(2, Destinations::like(weights));
    const int who = static_cast<int>(random() % 4);  // 3: nobody
    const auto step = static_cast<Step>(random() % 6);
    const At fails = [step](Step at, std::size_t) {
      if (at == step) throw UserError("at random");
    };
    const At fine = [](Step, std::size_t) {};
    SourceCall call{.weights = &weights,
                    .streaming = random() % 2 == 0,
                    .timeout = kLongTimeout / 3,
                    .at = who == 0 ? fails : fine};
    std::vector<std::future<Outcome>> ranks;
    for (int i = 0; i < 2; ++i) {
      ReceiverCall receive{
          .into = &into[static_cast<std::size_t>(i)], .pull = random() % 2 == 0, .timeout = kLongTimeout / 3};
      receive.at = who == i + 1 ? fails : fine;
      ranks.push_back(group.start_receiver(i, receive));
    }
    ranks.insert(ranks.begin() + static_cast<std::ptrdiff_t>(random() % 3), group.start_source(call));
    int committed = 0;
    for (auto& rank : ranks) {
      const Outcome outcome = get(std::move(rank));
      committed += outcome.ok ? 1 : 0;
      if (!outcome.ok) {
        EXPECT_TRUE(outcome.user_error || outcome.message == "at random") << outcome;
      }
    }
    // All or nobody. (kBound and kBucket are not steps of every kind of call.)
    EXPECT_TRUE(committed == 0 || committed == 3) << "round " << round << ": " << committed << " committed";
    if (who == 3) {
      EXPECT_EQ(committed, 3);
    }
  }
  group.sync_again();
}

// Ranks that refuse their own calls, some before the others come, and sessions that are closed and opened between: every
// failed call still ends one call of each rank, and no second one.
TEST_P(Faults, PairsCallsAgainWhicheverSessionsWereReopened) {
  std::mt19937_64 random(7);
  const auto one_of = [&random](unsigned n) { return random() % n == 0; };
  const At refuses = [](Step step, std::size_t) {
    if (step == Step::kOpened) throw UserError("refused");
  };
  const At fine = [](Step, std::size_t) {};
  Group group(GetParam(), 2);
  int reopened = 0;
  for (int round = 0; round < 80; ++round) {
    Weights weights = some_weights(static_cast<std::uint64_t>(round));
    std::vector<Destinations> into(2, Destinations::like(weights));
    const std::array<bool, 3> refusing{one_of(3), one_of(3), one_of(3)};
    const bool all_fine = !refusing[0] && !refusing[1] && !refusing[2];
    const auto start = [&](int who) {
      const At& at = refusing[static_cast<std::size_t>(who)] ? refuses : fine;
      if (who == 0) return group.start_source({.weights = &weights, .timeout = kLongTimeout / 3, .at = at});
      return group.start_receiver(
          who - 1, {.into = &into[static_cast<std::size_t>(who - 1)], .timeout = kLongTimeout / 3, .at = at});
    };
    std::vector<int> order{0, 1, 2};
    std::shuffle(order.begin(), order.end(), random);
    std::vector<std::pair<int, std::future<Outcome>>> ranks;
    for (const int who : order) {
      auto outcome = start(who);
      // Often over before the others begin. (A source that refuses waits for connections, which all have.)
      if (refusing[static_cast<std::size_t>(who)] && one_of(2)) {
        const Outcome early = get(std::move(outcome));
        EXPECT_TRUE(early.user_error || early.message == "refused")
            << "round " << round << ", " << who << ": " << early;
      } else {
        ranks.emplace_back(who, std::move(outcome));
      }
    }
    for (auto& [who, rank] : ranks) {
      const Outcome outcome = get(std::move(rank));
      EXPECT_EQ(outcome.ok, all_fine) << "round " << round << ", " << who << ": " << outcome;
      EXPECT_TRUE(outcome.ok || outcome.user_error || outcome.message == "refused")
          << "round " << round << ", " << who << ", refusing " << refusing[0] << refusing[1] << refusing[2] << ": "
          << outcome;
    }
    if (HasFailure()) return;
    const bool source = one_of(3);
    if (source) group.sender().close(false);
    for (int i = 0; i < 2; ++i) {
      const bool receiver = one_of(3);
      if (receiver) group.receiver(i).close(false);
      if (source && i == 0) group.reopen_source();
      if (receiver) {
        group.reopen_receiver(i);
      } else if (source) {
        group.connect(i);
      }
      reopened += (receiver ? 1 : 0) + (source ? 1 : 0);
    }
  }
  EXPECT_GT(reopened, 40);
  group.sync_again();
}

TEST_P(Faults, RanksThatAllOpenAnotherSessionStartAfresh) {
  for (const bool stays_away : {true, false}) {
    Group group(GetParam(), 1);
    group.sync_again(1);
    const At refuses = [](Step step, std::size_t) {
      if (step == Step::kOpened) throw UserError("refused");
    };
    Weights weights = some_weights(2);
    auto into = Destinations::like(weights);
    if (stays_away) {  // the receiver, from a sync that fails
      EXPECT_TRUE(get(group.start_source({.weights = &weights, .at = refuses})).user_error);
    } else {  // the source, from a call that fails
      EXPECT_TRUE(get(group.start_receiver(0, {.into = &into, .at = refuses})).user_error);
    }
    group.sender().close(false);
    group.receiver(0).close(false);
    group.reopen_source();
    group.reopen_receiver(0);
    group.sync_again(3);
    group.sync_again(4);
  }
}

// --- a rank is stuck ------------------------------------------------------------------------------------------------

class RankIsStuck : public ::testing::TestWithParam<std::tuple<const char*, Step>> {
 protected:
  [[nodiscard]] const char* transport() const { return std::get<0>(GetParam()); }
  [[nodiscard]] Step step() const { return std::get<1>(GetParam()); }
  [[nodiscard]] At stuck(const Gate& gate) const {
    return [this, &gate](Step at, std::size_t count) {
      if (at == step() && (at != Step::kBucket || count == 3)) gate.pass();
    };
  }
};

void expect_timed_out(const Outcome& outcome, int rank, Clock::time_point start) {
  EXPECT_EQ(outcome.kind, ErrorKind::kTimeout) << outcome;
  EXPECT_EQ(outcome.rank, rank) << outcome;
  EXPECT_NE(outcome.message.find(concat("rank ", rank)), std::string::npos) << outcome;
  EXPECT_GE(outcome.when - start, kShortTimeout) << outcome;
}

TEST_P(RankIsStuck, ReceiverIsNamedByEveryoneAtTheDeadline) {
  Group group(transport(), 3);
  Weights weights = some_weights(1);
  std::vector<Destinations> into(3, Destinations::like(weights));
  Gate gate;
  const auto start = Clock::now();
  auto stuck_rank = group.start_receiver(1, {.into = &into[1], .pull = true, .at = stuck(gate)});
  auto first = group.start_receiver(0, {.into = &into[0], .timeout = kShortTimeout});
  auto last = group.start_receiver(2, {.into = &into[2], .pull = true, .timeout = kShortTimeout});
  const Outcome sent = get(group.start_source({.weights = &weights, .timeout = kShortTimeout}));
  expect_timed_out(sent, receiver_rank(1), start);
  expect_timed_out(get(std::move(first)), receiver_rank(1), start);
  expect_timed_out(get(std::move(last)), receiver_rank(1), start);

  // It wakes up: told at once, and in step again.
  const auto awake = Clock::now();
  gate.open();
  const Outcome told = get(std::move(stuck_rank));
  EXPECT_FALSE(told.ok);
  EXPECT_EQ(told.message, sent.message);
  EXPECT_LT(told.when - awake, kAtOnce);
  group.sync_again();
}

// From its second step on: a source that has not begun is absent, see AReceiverThatWaitedInVainWasAlone.
class SourceIsStuck : public RankIsStuck {};

TEST_P(SourceIsStuck, AndNamedByEveryoneAtTheDeadline) {
  Group group(transport(), 2);
  Weights weights = some_weights(1);
  std::vector<Destinations> into(2, Destinations::like(weights));
  Gate gate;
  const auto start = Clock::now();
  SourceCall call{.weights = &weights, .streaming = step() == Step::kBucket, .at = stuck(gate)};
  if (step() == Step::kBound)
    call.at = [&gate](Step at, std::size_t) {
      if (at == Step::kReady) gate.pass();
    };
  auto sent = group.start_source(call);
  auto first = group.start_receiver(0, {.into = &into[0], .timeout = kShortTimeout});
  auto second = group.start_receiver(1, {.into = &into[1], .pull = true, .timeout = kShortTimeout});
  expect_timed_out(get(std::move(first)), kSource, start);
  expect_timed_out(get(std::move(second)), kSource, start);
  const auto awake = Clock::now();
  gate.open();
  const Outcome told = get(std::move(sent));
  EXPECT_EQ(told.kind, step() == Step::kJoined ? told.kind : ErrorKind::kTimeout) << told;
  EXPECT_FALSE(told.ok);
  EXPECT_LT(told.when - awake, kAtOnce);
  group.sync_again();
}

INSTANTIATE_TEST_SUITE_P(At, RankIsStuck,
                         ::testing::Combine(::testing::Values("shm", "gloo", "ipc"),
                                            ::testing::Values(Step::kOpened, Step::kJoined, Step::kBound, Step::kReady,
                                                              Step::kBucket, Step::kMoved)),
                         [](const auto& one) { return name_of(std::get<0>(one.param), std::get<1>(one.param)); });

INSTANTIATE_TEST_SUITE_P(At, SourceIsStuck,
                         ::testing::Combine(::testing::Values("shm", "gloo", "ipc"),
                                            ::testing::Values(Step::kJoined, Step::kBound, Step::kReady, Step::kBucket,
                                                              Step::kMoved)),
                         [](const auto& one) { return name_of(std::get<0>(one.param), std::get<1>(one.param)); });

// One rank's deadline passed; the others, which would have waited longer, say what it said.
TEST_P(Faults, ATimeoutKeepsItsTextAndRankOnTheRanksThatWouldHaveWaitedLonger) {
  for (const bool source_is_impatient : {true, false}) {
    SCOPED_TRACE(source_is_impatient ? "impatient source" : "impatient receiver");
    Group group(GetParam(), 2);
    Weights weights = weights_of({64 * 1024}, 1);
    std::vector<Destinations> into(2, Destinations::like(weights));
    Gate gate;
    SourceCall call{.weights = &weights};
    ReceiverCall receive{.into = &into[0]};
    (source_is_impatient ? call.timeout : receive.timeout) = kShortTimeout;
    auto stuck_rank =
        group.start_receiver(1, {.into = &into[1], .pull = true, .at = [&gate](Step step, std::size_t count) {
                                   if (step == Step::kBucket && count == 3) gate.pass();
                                 }});
    auto waiting = group.start_receiver(0, receive);
    const Outcome sent = get(group.start_source(call));
    const Outcome got = get(std::move(waiting));
    gate.open();
    (void)get(std::move(stuck_rank));
    const Outcome& first = source_is_impatient ? sent : got;
    const Outcome& told = source_is_impatient ? got : sent;
    EXPECT_EQ(first.kind, ErrorKind::kTimeout) << first;
    EXPECT_EQ(first.rank, receiver_rank(1)) << first;
    EXPECT_EQ(told.kind, ErrorKind::kTimeout) << told;
    EXPECT_EQ(told.rank, receiver_rank(1)) << told;
    EXPECT_EQ(told.message, first.message);
    group.sync_again();
  }
}

// A generator may take its time, as long as the receivers are patient: the source does not hold it against them.
TEST_P(Faults, ASlowGeneratorIsNotASlowReceiver) {
  Group group(GetParam(), 1);
  Weights weights = weights_of({1024, 1024, 1024}, 1);  // the last bucket closes before the end is known
  auto into = Destinations::like(weights);
  SourceCall call{.weights = &weights, .streaming = true, .timeout = kShortTimeout};
  Gate taken;
  call.at = [&](Step step, std::size_t count) {
    if (step != Step::kBucket || count != 2) return;
    const auto until = Clock::now() + kShortTimeout + kShortTimeout / 2;
    while (Clock::now() < until) std::this_thread::yield();  // computing
    taken.open();
  };
  // The receiver holds its buckets until then, so that the source has to wait for a free one.
  ReceiverCall receive{.into = &into, .pull = true};
  receive.at = [&](Step step, std::size_t count) {
    if (step != Step::kBucket || count != 1) return;
    taken.pass();
    const auto until = Clock::now() + kShortTimeout / 4;
    while (Clock::now() < until) std::this_thread::yield();
  };
  auto got = group.start_receiver(0, receive);
  const Outcome sent = get(group.start_source(call));
  EXPECT_TRUE(sent.ok) << sent;
  const Outcome outcome = get(std::move(got));
  EXPECT_TRUE(outcome.ok) << outcome;
}

INSTANTIATE_TEST_SUITE_P(Over, Faults, ::testing::Values("shm", "gloo", "ipc"),
                         [](const auto& one) { return std::string(one.param); });

}  // namespace
}  // namespace fastsync::testing

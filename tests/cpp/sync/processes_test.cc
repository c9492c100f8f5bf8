// Ranks in processes of their own, killed and stopped in the middle.
#include <fcntl.h>
#include <poll.h>

#include <cstring>

#include "group.h"
#include "support/process.h"

namespace fastsync::testing {
namespace {

using namespace std::chrono_literals;

constexpr std::chrono::milliseconds kShortTimeout{FASTSYNC_SANITIZED != 0 ? 2000 : 800};
constexpr std::uint64_t kSeed = 11;

Weights model() { return weights_of({40'000, 100, 40'000}, kSeed); }

// What a rank tells the test, in the order in which it happens.
struct Report {
  enum What : std::int32_t { kHere, kCommitted, kFailed, kOther };
  What what = kHere;
  std::int32_t kind = -1;
  std::int32_t rank = -1;
  std::int64_t when_ns = 0;  // steady_clock is one clock for all processes
  char text[400] = {};
};

// From a rank's process to the test, or one byte the other way.
class Pipe {
 public:
  Pipe() {
    int ends[2] = {-1, -1};
    if (::pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("pipe");
    read_.reset(ends[0]);
    write_.reset(ends[1]);
  }
  template <typename T>
  void put(const T& value) const {
    if (::write(write_.get(), &value, sizeof(value)) != sizeof(value)) throw std::runtime_error("pipe: short write");
  }
  template <typename T>
  [[nodiscard]] T take() const {
    pollfd ready{read_.get(), POLLIN, 0};
    if (::poll(&ready, 1, static_cast<int>(std::chrono::milliseconds(kLongTimeout).count())) != 1) {
      throw std::runtime_error("a rank says nothing");
    }
    T value;
    if (::read(read_.get(), &value, sizeof(value)) != sizeof(value)) throw std::runtime_error("pipe: short read");
    return value;
  }
  // Within `time`, nothing came.
  [[nodiscard]] bool silent(std::chrono::milliseconds time) const {
    pollfd ready{read_.get(), POLLIN, 0};
    return ::poll(&ready, 1, static_cast<int>(time.count())) == 0;
  }

 private:
  OwnedFd read_;
  OwnedFd write_;
};

struct Name {
  char text[100] = {};
};

// A rank's process: `calls` syncs in a row, each reported; it says when the first begins, and waits for the test before
// each later one. At `halt` of its first call it stops until the test says so.
struct RankProcess {
  Pipe reports;
  Pipe go_on;
  std::unique_ptr<Process> process;

  void kill(int signal) const { process->kill(signal); }
  void go() const { go_on.put('g'); }
  [[nodiscard]] Report next() const { return reports.take<Report>(); }
  void expect_here() const { ASSERT_EQ(next().what, Report::kHere); }
};

struct Script {
  std::chrono::nanoseconds timeout = kLongTimeout;  // of the first call
  int calls = 1;
  std::optional<Step> halt = std::nullopt;
  bool pull = false;
};

At at_of_call(const RankProcess& self, const Script& script, int call) {
  if (call > 0) {
    (void)self.go_on.take<char>();
    return [](Step, std::size_t) {};
  }
  return [&self, halt = script.halt](Step step, std::size_t count) {
    if (step == Step::kOpened) self.reports.put(Report{});
    if (!halt || step != *halt || (step == Step::kBucket && count != 2)) return;
    self.reports.put(Report{});
    (void)self.go_on.take<char>();
  };
}

void report(const RankProcess& self, const Outcome& outcome) {
  Report out;
  out.what = outcome.ok ? Report::kCommitted : outcome.kind ? Report::kFailed : Report::kOther;
  out.kind = outcome.kind ? static_cast<std::int32_t>(*outcome.kind) : -1;
  out.rank = outcome.rank;
  out.when_ns = outcome.when.time_since_epoch().count();
  std::strncpy(out.text, outcome.message.c_str(), sizeof(out.text) - 1);
  self.reports.put(out);
}

// A call whose open() throws has nothing to tell the others.
template <typename Call>
void make_call(const RankProcess& self, Call call) {
  Outcome outcome;
  try {
    outcome = call();
  } catch (const Error& error) {
    outcome.kind = error.kind();
    outcome.rank = error.rank();
    outcome.message = error.what();
    outcome.when = Clock::now();
  }
  report(self, outcome);
}

std::unique_ptr<RankProcess> fork_source(int receivers, const Script& script, std::string& name_out) {
  auto self = std::make_unique<RankProcess>();
  const Pipe names;
  self->process = std::make_unique<Process>([&] {
    WeightSender sender(identity_of(kSource, receivers));
    Name name;
    std::strncpy(name.text, sender.unix_name().c_str(), sizeof(name.text) - 1);
    names.put(name);
    Weights weights = model();
    for (int i = 0; i < script.calls; ++i) {
      SourceCall call{.weights = &weights,
                      .streaming = script.halt == Step::kBucket,
                      .timeout = i == 0 ? script.timeout : kLongTimeout};
      call.options.version = static_cast<std::uint64_t>(i) + 1;
      call.at = at_of_call(*self, script, i);
      make_call(*self, [&] { return run_source(sender, "shm", nullptr, call); });
    }
  });
  name_out = names.take<Name>().text;
  return self;
}

std::unique_ptr<RankProcess> fork_receiver(int index, int receivers, const Script& script, const std::string& name) {
  auto self = std::make_unique<RankProcess>();
  self->process = std::make_unique<Process>([&] {
    WeightReceiver receiver(identity_of(receiver_rank(index), receivers));
    auto socket = connect_unix(name);
    if (!socket) throw std::runtime_error("cannot connect");
    receiver.connect(std::move(*socket));
    const Weights weights = model();
    for (int i = 0; i < script.calls; ++i) {
      auto into = Destinations::like(weights);
      ReceiverCall call{.into = &into, .pull = script.pull, .timeout = i == 0 ? script.timeout : kLongTimeout};
      call.at = at_of_call(*self, script, i);
      make_call(*self, [&] {
        Outcome outcome = run_receiver(receiver, index, nullptr, call);
        if (outcome.ok && !into.hold(weights)) throw InternalError("committed, and holds other bytes");
        return outcome;
      });
    }
  });
  return self;
}

std::chrono::nanoseconds since(Clock::time_point start, const Report& report) {
  return std::chrono::nanoseconds(report.when_ns) - start.time_since_epoch();
}

void expect_lost(const RankProcess& rank, int lost, Clock::time_point killed) {
  const Report report = rank.next();
  EXPECT_EQ(report.what, Report::kFailed) << report.text;
  EXPECT_EQ(report.kind, static_cast<int>(ErrorKind::kPeerLost)) << report.text;
  EXPECT_EQ(report.rank, lost) << report.text;
  EXPECT_NE(std::string_view(report.text).find(concat("rank ", lost)), std::string_view::npos) << report.text;
  EXPECT_LT(since(killed, report), kAtOnce);
}

// For good: a later call says so again, and does not wait.
void expect_still_lost(const RankProcess& rank) {
  rank.go();
  const Report again = rank.next();
  EXPECT_EQ(again.kind, static_cast<int>(ErrorKind::kPeerLost)) << again.text;
  EXPECT_EQ(rank.process->join(), 0);
}

class SourceKilledAt : public ::testing::TestWithParam<Step> {};
class ReceiverKilledAt : public ::testing::TestWithParam<Step> {};

TEST_P(SourceKilledAt, IsLostOnEveryReceiverAtOnce) {
  std::string name;
  const auto source = fork_source(2, {.halt = GetParam()}, name);
  const auto first = fork_receiver(0, 2, {.calls = 2}, name);
  const auto second = fork_receiver(1, 2, {.calls = 2, .pull = true}, name);
  for (const auto* rank : {source.get(), first.get(), second.get()}) rank->expect_here();
  source->expect_here();
  const auto killed = Clock::now();
  source->kill(SIGKILL);
  for (const auto* receiver : {first.get(), second.get()}) expect_lost(*receiver, kSource, killed);
  for (const auto* receiver : {first.get(), second.get()}) expect_still_lost(*receiver);
}

TEST_P(ReceiverKilledAt, IsLostOnEveryOtherRankAtOnce) {
  std::string name;
  const auto source = fork_source(3, {.calls = 2}, name);
  const auto first = fork_receiver(0, 3, {.calls = 2}, name);
  const auto victim = fork_receiver(1, 3, {.halt = GetParam(), .pull = true}, name);
  const auto third = fork_receiver(2, 3, {.calls = 2, .pull = true}, name);
  for (const auto* rank : {source.get(), first.get(), victim.get(), third.get()}) rank->expect_here();
  victim->expect_here();
  const auto killed = Clock::now();
  victim->kill(SIGKILL);
  for (const auto* rank : {source.get(), first.get(), third.get()}) expect_lost(*rank, receiver_rank(1), killed);
  for (const auto* rank : {source.get(), first.get(), third.get()}) expect_still_lost(*rank);
}

std::string step_name(const ::testing::TestParamInfo<Step>& one) {
  std::ostringstream out;
  out << one.param;
  return out.str();
}
INSTANTIATE_TEST_SUITE_P(In, ReceiverKilledAt,
                         ::testing::Values(Step::kOpened, Step::kJoined, Step::kBound, Step::kReady, Step::kBucket,
                                           Step::kMoved),
                         step_name);
INSTANTIATE_TEST_SUITE_P(In, SourceKilledAt,
                         ::testing::Values(Step::kOpened, Step::kJoined, Step::kReady, Step::kBucket, Step::kMoved),
                         step_name);

void expect_timed_out(const RankProcess& rank, int stuck, Clock::time_point start) {
  const Report report = rank.next();
  EXPECT_EQ(report.kind, static_cast<int>(ErrorKind::kTimeout)) << report.text;
  EXPECT_EQ(report.rank, stuck) << report.text;
  EXPECT_NE(std::string_view(report.text).find(concat("rank ", stuck)), std::string_view::npos) << report.text;
  EXPECT_LT(since(start, report), 2 * kShortTimeout + kAtOnce);
}

// It wakes when everybody else has given up: told at once, and in step again.
void expect_told_and_in_step(const RankProcess& stopped, const std::vector<const RankProcess*>& everybody) {
  const auto awake = Clock::now();
  stopped.kill(SIGCONT);
  const Report told = stopped.next();
  EXPECT_EQ(told.what, Report::kFailed) << told.text;
  EXPECT_LT(since(awake, told), kAtOnce);
  for (const RankProcess* rank : everybody) rank->go();
  for (const RankProcess* rank : everybody) {
    const Report next = rank->next();
    EXPECT_EQ(next.what, Report::kCommitted) << next.text;
    EXPECT_EQ(rank->process->join(), 0);
  }
}

TEST(Stopped, ReceiverIsNamedAtTheDeadlineAndJoinsTheNextSyncWhenItWakes) {
  std::string name;
  const auto source = fork_source(3, {.timeout = kShortTimeout, .calls = 2}, name);
  const auto first = fork_receiver(0, 3, {.timeout = kShortTimeout, .calls = 2}, name);
  const auto stopped = fork_receiver(1, 3, {.calls = 2, .halt = Step::kBucket, .pull = true}, name);
  const auto third = fork_receiver(2, 3, {.timeout = kShortTimeout, .calls = 2, .pull = true}, name);
  const std::vector<const RankProcess*> everybody{source.get(), first.get(), stopped.get(), third.get()};
  for (const RankProcess* rank : everybody) rank->expect_here();
  stopped->expect_here();
  const auto start = Clock::now();
  stopped->kill(SIGSTOP);
  stopped->go();  // it would go on
  for (const auto* rank : {source.get(), first.get(), third.get()}) expect_timed_out(*rank, receiver_rank(1), start);
  expect_told_and_in_step(*stopped, everybody);
}

TEST(Stopped, SourceIsNamedAtTheDeadlineAndBeginsTheNextSyncWhenItWakes) {
  std::string name;
  const auto stopped = fork_source(2, {.calls = 2, .halt = Step::kBucket}, name);
  const auto first = fork_receiver(0, 2, {.timeout = kShortTimeout, .calls = 2}, name);
  const auto second = fork_receiver(1, 2, {.timeout = kShortTimeout, .calls = 2, .pull = true}, name);
  const std::vector<const RankProcess*> everybody{stopped.get(), first.get(), second.get()};
  for (const RankProcess* rank : everybody) rank->expect_here();
  stopped->expect_here();
  const auto start = Clock::now();
  stopped->kill(SIGSTOP);
  stopped->go();
  for (const auto* rank : {first.get(), second.get()}) expect_timed_out(*rank, kSource, start);
  expect_told_and_in_step(*stopped, everybody);
}

TEST(Killed, SourceThatNeverGreetedIsLost) {
  for (int round = 0; round < 10; ++round) {
    const Pipe names;
    const Process source([&] {
      WeightSender sender(identity_of(kSource, 1));
      Name out;
      std::strncpy(out.text, sender.unix_name().c_str(), sizeof(out.text) - 1);
      names.put(out);
      ::pause();
    });
    const std::string name = names.take<Name>().text;
    WeightReceiver receiver(identity_of(receiver_rank(0), 1));
    auto socket = connect_unix(name);
    ASSERT_TRUE(socket);
    receiver.connect(std::move(*socket));
    Clock::time_point killed{};
    int looks = 0;
    receiver.open(kLongTimeout, [&] {  // on every look at the source
      if (++looks != 2) return;
      killed = Clock::now();
      source.kill(SIGKILL);
    });
    try {
      (void)receiver.join("auto");
      ADD_FAILURE() << "nobody was there";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kPeerLost) << error.what();
      EXPECT_EQ(error.rank(), kSource);
      EXPECT_LT(Clock::now() - killed, kAtOnce);
    } catch (const SourceClosed&) {
      ADD_FAILURE() << "it was taken for a source that closed its session";
    }
    receiver.fail(ErrorKind::kState, -1, "");
  }
}

}  // namespace
}  // namespace fastsync::testing

// Who may connect, who comes again, and what a peer that breaks the rules can do: be refused, never more.
#include <fcntl.h>
#include <sys/socket.h>

#include "comm/shm/shm_communicator.h"
#include "group.h"
#include "support/process.h"

namespace fastsync::testing {
namespace {

using namespace std::chrono_literals;

Link dial(WeightSender& sender) {
  auto socket = connect_unix(sender.unix_name());
  if (!socket) throw InternalError("the source does not listen");
  return Link(std::move(*socket));
}

std::optional<Frame> next_frame(Link& link, std::chrono::nanoseconds timeout = kLongTimeout) {
  const auto end = Clock::now() + timeout;
  for (;;) {
    link.poll_now();
    if (auto frame = link.receive()) return frame;
    if (link.gone() || Clock::now() > end) return std::nullopt;
    Link* const links[] = {&link};
    wait_readable(links, -1, 50ms);
  }
}

Hello hello_of(int rank, int receivers) {
  const Identity identity = identity_of(rank, receivers);
  Hello hello;
  hello.rank = static_cast<std::uint32_t>(rank);
  hello.world = static_cast<std::uint32_t>(identity.ranks.size());
  hello.source = kSource;
  hello.pid = static_cast<std::uint64_t>(::getpid());
  hello.token = identity.token;
  hello.host = identity.host;
  return hello;
}

Join join_of(std::uint64_t call) {
  Join join;
  join.call = call;
  join.transport = "auto";
  return join;
}

// A source in a thread that waits for its only receiver, which `stranger` is not; then the receiver comes, and the sync
// works. Anything that a stranger does must leave it so.
template <typename Stranger>
void expect_undisturbed(Stranger stranger) {
  Group group("shm", 1, false);
  Weights weights = some_weights(1);
  auto into = Destinations::like(weights);
  auto sent = group.start_source({.weights = &weights});
  stranger(group.sender());
  group.connect(0);
  const Outcome got = get(group.start_receiver(0, {.into = &into}));
  const Outcome outcome = get(std::move(sent));
  EXPECT_TRUE(outcome.ok) << outcome;
  EXPECT_TRUE(got.ok) << got;
  EXPECT_TRUE(into.hold(weights));
}

void expect_refused(const std::optional<Frame>& frame, ErrorKind kind, const std::string& text) {
  ASSERT_TRUE(frame);
  ASSERT_EQ(frame->type, FrameType::kReject);
  Failure failure;
  decode(frame->payload, failure);
  EXPECT_EQ(failure.kind, kind);
  EXPECT_NE(failure.message.find(text), std::string::npos) << failure.message;
}

// --- strangers ------------------------------------------------------------------------------------------------------

TEST(Stranger, WithAWrongTokenIsRefused) {
  expect_undisturbed([](WeightSender& sender) {
    Link link = dial(sender);
    Hello hello = hello_of(receiver_rank(0), 1);
    hello.token = "guessed";
    link.send(FrameType::kHello, 0, 0, encode(hello));
    expect_refused(next_frame(link), ErrorKind::kComm, "token");
  });
}

TEST(Stranger, WithAnotherSourceOrGroupIsRefused) {
  expect_undisturbed([](WeightSender& sender) {
    Link link = dial(sender);
    Hello hello = hello_of(receiver_rank(0), 1);
    hello.source = 0;
    link.send(FrameType::kHello, 0, 0, encode(hello));
    expect_refused(next_frame(link), ErrorKind::kInvalidArgument,
                   "rank 20 expects source 0 in a group of 2 ranks; this is rank 10");
  });
  expect_undisturbed([](WeightSender& sender) {
    Link link = dial(sender);
    link.send(FrameType::kHello, 0, 0, encode(hello_of(receiver_rank(0), 7)));
    expect_refused(next_frame(link), ErrorKind::kInvalidArgument,
                   "in a group of 8 ranks; this is rank 10 in a group of 2");
  });
}

TEST(Stranger, WithARankThatIsNotInTheGroupIsRefused) {
  for (const int rank : {0, kSource, 21, -1}) {
    expect_undisturbed([rank](WeightSender& sender) {
      Link link = dial(sender);
      link.send(FrameType::kHello, 0, 0, encode(hello_of(rank, 1)));
      expect_refused(next_frame(link), ErrorKind::kInvalidArgument, "is not in this group");
    });
  }
}

TEST(Stranger, WithBytesThatAreNotOursIsHungUpOn) {
  const std::vector<std::string> openings{
      "GET / HTTP/1.1\r\nHost: example.org\r\nUser-Agent: somebody\r\n\r\n",
      std::string(100'000, '\0'),
      std::string(40, '\xFF'),
  };
  for (const std::string& text : openings) {
    expect_undisturbed([&text](WeightSender& sender) {
      Link link = dial(sender);
      (void)!::send(link.fd(), text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      EXPECT_FALSE(next_frame(link));
      EXPECT_TRUE(link.gone());
    });
  }
}

TEST(Stranger, WithAFrameOtherThanHelloIsHungUpOn) {
  expect_undisturbed([](WeightSender& sender) {
    Link link = dial(sender);
    link.send(FrameType::kJoin, 0, 0, encode(join_of(1)));
    EXPECT_FALSE(next_frame(link));
    EXPECT_TRUE(link.gone());
  });
}

TEST(Stranger, WithABrokenHelloIsHungUpOn) {
  expect_undisturbed([](WeightSender& sender) {
    Link link = dial(sender);
    auto bytes = encode(hello_of(receiver_rank(0), 1));
    bytes.resize(bytes.size() / 2);
    link.send(FrameType::kHello, 0, 0, bytes);
    EXPECT_FALSE(next_frame(link));
    EXPECT_TRUE(link.gone());
  });
}

// Who has not said who it is, gets no megabytes of ours to fill.
TEST(Stranger, WithAnEnormousHelloIsHungUpOn) {
  expect_undisturbed([](WeightSender& sender) {
    Link link = dial(sender);
    FrameHeader header;
    header.type = FrameType::kHello;
    header.payload_bytes = 1 << 20;
    std::array<std::byte, kFrameHeaderBytes> bytes{};
    encode_frame_header(header, bytes.data());
    ASSERT_EQ(::send(link.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
    EXPECT_FALSE(next_frame(link));
    EXPECT_TRUE(link.gone());
  });
}

TEST(Stranger, ThatSaysNothingOrComesInHundredsDisturbsNobody) {
  expect_undisturbed([](WeightSender& sender) {
    std::vector<Link> links;
    for (int i = 0; i < 300; ++i) {
      auto socket = connect_unix(sender.unix_name());
      if (!socket) break;  // the backlog is full: as it should be
      links.emplace_back(std::move(*socket));
    }
    EXPECT_GT(links.size(), 100U);
  });
}

TEST(Stranger, LeavesNoDescriptorBehind) {
  Group group("shm", 1);
  group.sync_again(1);
  const int before = open_descriptors();
  Weights weights = some_weights(1);
  auto sent = group.start_source({.weights = &weights});
  for (int i = 0; i < 5; ++i) {
    Link link = dial(group.sender());
    const std::array<int, 2> passed{0, 1};
    link.send(FrameType::kHello, 0, 0, encode(hello_of(receiver_rank(0), 1)), passed);
    EXPECT_FALSE(next_frame(link));
    EXPECT_TRUE(link.gone());
  }
  auto into = Destinations::like(weights);
  EXPECT_TRUE(get(group.start_receiver(0, {.into = &into})).ok);
  EXPECT_TRUE(get(std::move(sent)).ok);
  EXPECT_EQ(open_descriptors(), before);
}

TEST(Stranger, DuringTheBucketsDisturbsNobody) {
  Group group("shm", 2);
  Weights weights = weights_of({50'000, 50'000}, 1);
  std::vector<Destinations> into(2, Destinations::like(weights));
  std::vector<Link> strangers;
  ReceiverCall call{.into = &into[0], .pull = true};
  call.at = [&](Step step, std::size_t count) {
    if (step != Step::kBucket || count % 10 != 0) return;
    strangers.push_back(dial(group.sender()));
    const std::string text = count % 20 == 0 ? "GET / HTTP/1.1\r\n\r\n and enough to be a header" : "FSY";
    (void)!::send(strangers.back().fd(), text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  };
  auto first = group.start_receiver(0, call);
  auto second = group.start_receiver(1, {.into = &into[1]});
  const Outcome sent = get(group.start_source({.weights = &weights}));
  EXPECT_TRUE(sent.ok) << sent;
  EXPECT_TRUE(get(std::move(first)).ok);
  EXPECT_TRUE(get(std::move(second)).ok);
  EXPECT_GT(strangers.size(), 5U);
  for (const Destinations& d : into) EXPECT_TRUE(d.hold(weights));
}

// Two versions in one group: everybody can read why nothing works, and it works once they agree.
TEST(Connections, AnotherProtocolIsAReadableErrorOnEveryRank) {
  Group group("shm", 2, false);
  group.connect(0);
  Weights weights = some_weights(1);
  auto into = Destinations::like(weights);
  auto got = group.start_receiver(0, {.into = &into});
  auto sent = group.start_source({.weights = &weights});
  Link link = dial(group.sender());
  Hello hello = hello_of(receiver_rank(1), 2);
  hello.protocol = kProtocolVersion + 1;
  link.send(FrameType::kHello, 0, 0, encode(hello));
  const std::string expected = concat("speaks fastsync protocol ", kProtocolVersion);
  expect_refused(next_frame(link), ErrorKind::kComm, expected);
  for (const Outcome& outcome : {get(std::move(sent)), get(std::move(got))}) {
    EXPECT_EQ(outcome.kind, ErrorKind::kComm) << outcome;
    EXPECT_NE(outcome.message.find(expected), std::string::npos) << outcome;
  }
  group.connect(1);
  // Its first call belongs to the sync that failed before it came.
  auto next = group.start_source({.weights = &weights});
  auto again = group.start_receiver(0, {.into = &into});
  EXPECT_EQ(get(group.start_receiver(1, {.into = &into})).kind, ErrorKind::kComm);
  auto also_into = Destinations::like(weights);
  EXPECT_TRUE(get(group.start_receiver(1, {.into = &also_into})).ok);
  EXPECT_TRUE(get(std::move(next)).ok);
  EXPECT_TRUE(get(std::move(again)).ok);
}

TEST(Connections, ASecondProcessOfTheSameRankIsRefusedAndSaysSo) {
  Group group("shm", 1);
  group.sync_again(1);
  WeightReceiver twin(identity_of(receiver_rank(0), 1));
  auto socket = connect_unix(group.sender().unix_name());
  ASSERT_TRUE(socket);
  twin.connect(std::move(*socket));
  Weights weights = some_weights(2);
  auto into = Destinations::like(weights);
  auto twin_into = Destinations::like(weights);
  auto sent = group.start_source({.weights = &weights});
  const Outcome refused =
      get(std::async(std::launch::async, [&] { return run_receiver(twin, 0, nullptr, {.into = &twin_into}); }));
  EXPECT_EQ(refused.kind, ErrorKind::kInvalidArgument) << refused;
  EXPECT_NE(refused.message.find("rank 20 is already connected"), std::string::npos) << refused;
  EXPECT_TRUE(get(group.start_receiver(0, {.into = &into})).ok);
  const Outcome outcome = get(std::move(sent));
  EXPECT_TRUE(outcome.ok) << outcome;
  EXPECT_TRUE(into.hold(weights));
  EXPECT_TRUE(twin_into.untouched());
}

class Sessions : public EveryTransport {};

// --- sessions come and go -------------------------------------------------------------------------------------------

TEST(Connections, ASourceThatClosesReachesReceiversItNeverGreeted) {
  Group group("shm", 2);
  Weights weights = some_weights(1);
  auto into = Destinations::like(weights);
  auto waiting = group.start_receiver(0, {.into = &into});
  group.sender().close(false);
  const Outcome got = get(std::move(waiting));
  EXPECT_TRUE(got.source_closed) << got;
  // The other one was not even in its call.
  EXPECT_TRUE(get(group.start_receiver(1, {.into = &into})).source_closed);
  // The next session of the source works with the same receivers.
  group.reopen_source();
  for (int i = 0; i < 2; ++i) group.connect(i);
  group.sync_again();
}

TEST(Connections, ASourceThatClosesBetweenSyncsIsFoundAgain) {
  Group group("shm", 2);
  for (std::uint64_t round = 1; round <= 3; ++round) {
    group.sync_again(round);
    group.sender().close(false);
    Weights weights = some_weights(1);
    auto into = Destinations::like(weights);
    for (int i = 0; i < 2; ++i) {
      const Outcome got = get(group.start_receiver(i, {.into = &into}));
      EXPECT_TRUE(got.source_closed) << got;
    }
    group.reopen_source();
    for (int i = 0; i < 2; ++i) group.connect(i);
  }
  group.sync_again(9);
}

TEST(Connections, ASourceProcessThatEndsIsLostForGood) {
  Group group("shm", 1);
  group.sync_again(1);
  group.sender().close(true);
  Weights weights = some_weights(1);
  auto into = Destinations::like(weights);
  for (int round = 0; round < 2; ++round) {
    const Outcome got = get(std::async(std::launch::async, [&]() -> Outcome {
      try {
        return run_receiver(group.receiver(0), 0, nullptr, {.into = &into});
      } catch (const Error& error) {  // from open(): nothing to tell anybody
        Outcome out;
        out.kind = error.kind();
        out.rank = error.rank();
        return out;
      }
    }));
    EXPECT_EQ(got.kind, ErrorKind::kPeerLost) << got;
    EXPECT_EQ(got.rank, kSource);
  }
}

TEST_P(Sessions, AReceiverThatClosesAndComesAgainIsWelcome) {
  Group group(GetParam(), 2);
  for (std::uint64_t round = 1; round <= 3; ++round) {
    group.sync_again(round);
    group.receiver(1).close(false);
    group.reopen_receiver(1);
  }
  group.sync_again(9);
}

// What the old session was told is not told again to the new one.
TEST_P(Sessions, ANewSessionOfAReceiverStartsAfresh) {
  Group group(GetParam(), 1);
  group.sync_again(1);
  Weights weights = some_weights(2);
  const At refuses = [](Step step, std::size_t) {
    if (step == Step::kOpened) throw UserError("bad version");
  };
  EXPECT_TRUE(get(group.start_source({.weights = &weights, .at = refuses})).user_error);
  auto into = Destinations::like(weights);
  EXPECT_EQ(get(group.start_receiver(0, {.into = &into})).message, "bad version");
  group.receiver(0).close(false);
  group.reopen_receiver(0);
  group.sync_again(3);
}

TEST_P(Sessions, AReceiverThatClosesInTheMiddleFailsTheSync) {
  Group group(GetParam(), 2);
  Weights weights = some_weights(1);
  std::vector<Destinations> into(2, Destinations::like(weights));
  auto closing = std::async(std::launch::async, [&] {
    WeightReceiver& receiver = group.receiver(1);
    receiver.open(kLongTimeout, nullptr);
    (void)receiver.join("auto");
    receiver.close(false);
  });
  auto other = group.start_receiver(0, {.into = &into[0]});
  const Outcome sent = get(group.start_source({.weights = &weights}));
  closing.get();
  EXPECT_EQ(sent.kind, ErrorKind::kPeerFailed) << sent;
  EXPECT_EQ(sent.rank, receiver_rank(1));
  EXPECT_NE(sent.message.find("rank 21 closed its session"), std::string::npos) << sent;
  EXPECT_EQ(get(std::move(other)).message, sent.message);
  group.reopen_receiver(1);
  group.sync_again();
}

TEST_P(Sessions, ASourceThatClosesInTheMiddleFailsTheSync) {
  Group group(GetParam(), 2);
  Weights weights = some_weights(1);
  std::vector<Destinations> into(2, Destinations::like(weights));
  auto first = group.start_receiver(0, {.into = &into[0]});
  auto second = group.start_receiver(1, {.into = &into[1]});
  std::async(std::launch::async, [&] {
    group.sender().open(kLongTimeout, nullptr);
    (void)group.sender().join("auto", {GetParam()});
    group.sender().close(false);
  }).get();
  for (const Outcome& outcome : {get(std::move(first)), get(std::move(second))}) {
    EXPECT_EQ(outcome.kind, ErrorKind::kPeerFailed) << outcome;
    EXPECT_EQ(outcome.rank, kSource);
    EXPECT_NE(outcome.message.find("rank 10 closed its session"), std::string::npos) << outcome;
  }
}

TEST_P(Sessions, ACommitBeatsTheCloseThatFollowsIt) {
  for (const bool exiting : {false, true}) {
    for (int round = 0; round < 10; ++round) {
      Group group(GetParam(), 2);
      Weights weights = some_weights(1);
      std::vector<Destinations> into(2, Destinations::like(weights));
      auto first = group.start_receiver(0, {.into = &into[0]});
      auto second = group.start_receiver(1, {.into = &into[1], .pull = true});
      const Outcome sent = get(group.start_source({.weights = &weights}));
      group.sender().close(exiting);
      EXPECT_TRUE(sent.ok) << sent;
      for (const Outcome& outcome : {get(std::move(first)), get(std::move(second))}) EXPECT_TRUE(outcome.ok) << outcome;
      for (const Destinations& d : into) EXPECT_TRUE(d.hold(weights));
    }
  }
}

TEST(Connections, CallsOutOfOrderAreStateErrors) {
  Group group("shm", 1, false);
  WeightReceiver& receiver = group.receiver(0);
  receiver.open(kLongTimeout, nullptr);
  EXPECT_THROW(receiver.open(kLongTimeout, nullptr), StateError);
  EXPECT_THROW(receiver.join("auto"), StateError) << "it is not connected";
  receiver.fail(ErrorKind::kState, -1, "not connected");
  group.sender().open(kLongTimeout, nullptr);
  EXPECT_THROW(group.sender().open(kLongTimeout, nullptr), StateError);
  group.sender().fail(ErrorKind::kState, -1, "twice");
  group.sender().fail(ErrorKind::kState, -1, "nothing runs");
  group.sender().close(false);
  group.sender().close(false);
  EXPECT_THROW(group.sender().open(kLongTimeout, nullptr), StateError);
  receiver.close(false);
  receiver.close(false);
}

// --- members that break the rules -----------------------------------------------------------------------------------

// The source of a group of one receiver, which `member` plays by hand. Returns what the source made of it.
template <typename Member>
Outcome source_against(Member member, std::chrono::nanoseconds timeout = kLongTimeout / 3) {
  Group group("shm", 1, false);
  Weights weights = some_weights(1);
  auto sent = group.start_source({.weights = &weights, .timeout = timeout});
  {
    Link link = dial(group.sender());
    link.send(FrameType::kHello, 0, 0, encode(hello_of(receiver_rank(0), 1)));
    member(link);
  }
  return get(std::move(sent));
}

void expect_blamed(const Outcome& outcome, ErrorKind kind, const std::string& text) {
  EXPECT_EQ(outcome.kind, kind) << outcome;
  EXPECT_EQ(outcome.rank, receiver_rank(0)) << outcome;
  EXPECT_NE(outcome.message.find(text), std::string::npos) << outcome;
}

TEST(BadReceiver, ThatJoinsTwiceAndEndsIsLost) {
  expect_blamed(source_against([](Link& link) {
                  link.send(FrameType::kJoin, 0, 0, encode(join_of(1)));
                  EXPECT_EQ(next_frame(link)->type, FrameType::kWelcome);
                  EXPECT_EQ(next_frame(link)->type, FrameType::kBegin);
                  link.send(FrameType::kJoin, 0, 0, encode(join_of(2)));
                  link.send(FrameType::kJoin, 0, 0, encode(join_of(3)));
                }),
                ErrorKind::kPeerLost, "rank 20 was lost");
}

TEST(BadReceiver, ThatEndsInTheMiddleOfAFrameIsLost) {
  expect_blamed(source_against([](Link& link) {
                  EXPECT_EQ(next_frame(link)->type, FrameType::kWelcome);
                  (void)!::send(link.fd(), "FSY1 and no more", 16, MSG_NOSIGNAL);
                }),
                ErrorKind::kPeerLost, "rank 20 was lost");
}

TEST(BadReceiver, ThatSendsWhatIsNoFrameIsNamed) {
  expect_blamed(source_against([](Link& link) {
                  EXPECT_EQ(next_frame(link)->type, FrameType::kWelcome);
                  const std::string text(64, 'x');
                  (void)!::send(link.fd(), text.data(), text.size(), MSG_NOSIGNAL);
                  (void)next_frame(link);
                }),
                ErrorKind::kComm, "rank 20 sent bytes that are not ours");
}

TEST(BadReceiver, ThatSendsAnotherSidesFrameIsNamed) {
  for (const FrameType type :
       {FrameType::kBegin, FrameType::kGo, FrameType::kCommit, FrameType::kHello, FrameType::kBucket}) {
    expect_blamed(source_against([type](Link& link) {
                    EXPECT_EQ(next_frame(link)->type, FrameType::kWelcome);
                    link.send(type, 1, 0);
                    (void)next_frame(link);
                  }),
                  ErrorKind::kComm, "unexpected control frame");
  }
}

TEST(BadReceiver, ThatSendsABrokenPayloadIsNamed) {
  for (const FrameType type : {FrameType::kJoin, FrameType::kFail, FrameType::kDone}) {
    expect_blamed(source_against([type](Link& link) {
                    EXPECT_EQ(next_frame(link)->type, FrameType::kWelcome);
                    if (type != FrameType::kJoin) {
                      link.send(FrameType::kJoin, 0, 0, encode(join_of(1)));
                      EXPECT_EQ(next_frame(link)->type, FrameType::kBegin);
                    }
                    const std::vector<std::byte> broken(3, std::byte{9});
                    link.send(type, 1, 0, broken);
                    while (next_frame(link)) continue;
                  }),
                  ErrorKind::kComm, "rank 20");
  }
}

TEST(BadReceiver, ThatSendsRandomFramesEndsTheSyncAndNothingElse) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 60; ++round) {
    const Outcome outcome = source_against(
        [&random](Link& link) {
          link.send(FrameType::kJoin, 0, 0, encode(join_of(1)));
          for (int i = 0; i < 20; ++i) {
            std::vector<std::byte> payload(random() % 60);
            for (std::byte& b : payload) b = static_cast<std::byte>(random() % 4);
            const std::array<int, 1> passed{0};
            link.send(static_cast<FrameType>(1 + random() % 18), random() % 3, random() % 4, payload,
                      random() % 5 == 0 ? std::span<const int>(passed) : std::span<const int>());
          }
        },
        1s);
    EXPECT_FALSE(outcome.ok);
    EXPECT_TRUE(outcome.kind) << outcome;
  }
}

// A receiver whose source is played by hand, up to the end of its call.
class BadSource : public ::testing::Test {
 protected:
  BadSource() {
    int ends[2] = {-1, -1};
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) throw std::runtime_error("socketpair");
    source_ = std::make_unique<Link>(OwnedFd(ends[0]));
    receiver_.connect(OwnedFd(ends[1]));
    into_ = Destinations::like(weights_);
    for (const TensorMeta& meta : weights_.metas) manifest_.append(meta);
  }
  void start(bool pull = false) {
    got_ = std::async(std::launch::async, [this, pull] {
      return run_receiver(receiver_, 0, nullptr, {.into = &into_, .pull = pull, .timeout = kLongTimeout / 3});
    });
    EXPECT_EQ(next_frame(*source_)->type, FrameType::kHello);
    source_->send(FrameType::kWelcome, 0, 0);
    const auto frame = next_frame(*source_);
    ASSERT_TRUE(frame);
    ASSERT_EQ(frame->type, FrameType::kJoin);
    Join join;
    decode(frame->payload, join);
    call_ = join.call;
  }
  [[nodiscard]] Begin a_begin() const {
    Begin begin;
    begin.version = 1;
    begin.fingerprint = manifest_.fingerprint();
    begin.tensors = manifest_.size();
    begin.nbytes = manifest_.nbytes();
    begin.bucket_bytes = begin.asked_bytes = 1024;
    begin.comm_generation = 1;
    begin.buffers = 2;
    begin.verify = 1;
    begin.strict = 1;
    begin.manifest_follows = 1;
    begin.transport = "shm";
    return begin;
  }
  void send_begin(const Begin& begin) { source_->send(FrameType::kBegin, 1, call_, encode(begin)); }
  void send_manifest() { source_->send(FrameType::kManifest, 1, 0, manifest_.serialize(0, manifest_.size())); }
  void expect_blamed(const std::string& text) {
    const Outcome outcome = get(std::move(got_));
    EXPECT_EQ(outcome.kind, ErrorKind::kComm) << outcome;
    EXPECT_NE(outcome.message.find(text), std::string::npos) << outcome;
    EXPECT_TRUE(into_.untouched());
  }

  Weights weights_ = some_weights(1);
  Manifest manifest_;
  Destinations into_;
  std::unique_ptr<Link> source_;
  WeightReceiver receiver_{identity_of(receiver_rank(0), 1)};
  std::future<Outcome> got_;
  std::uint64_t call_ = 0;
};

TEST_F(BadSource, ThatSendsWhatIsNoFrameIsNamed) {
  start();
  const std::string text(64, 'x');
  (void)!::send(source_->fd(), text.data(), text.size(), MSG_NOSIGNAL);
  expect_blamed("rank 10 (the source): control frame: not fastsync's");
}

TEST_F(BadSource, ThatSendsAnotherManifestThanItAnnouncedIsCaught) {
  start();
  Begin begin = a_begin();
  begin.fingerprint ^= 1;
  send_begin(begin);
  send_manifest();
  expect_blamed("fingerprint");
}

TEST_F(BadSource, ThatSendsABrokenManifestIsCaught) {
  start();
  send_begin(a_begin());
  auto bytes = manifest_.serialize(0, manifest_.size());
  bytes[bytes.size() / 2] = std::byte{0xFF};
  source_->send(FrameType::kManifest, 1, 0, bytes);
  expect_blamed("rank 10 (the source)");
}

TEST_F(BadSource, ThatNamesAPlanNobodyHoldsIsCaught) {
  start();
  Begin begin = a_begin();
  begin.manifest_follows = 0;
  send_begin(begin);
  expect_blamed("a plan that this rank does not hold");
}

// The fingerprint of an empty manifest is 0, and so is that of none.
TEST_F(BadSource, ThatNamesNoPlanAtAllIsCaught) {
  start();
  Begin begin = a_begin();
  begin.manifest_follows = 0;
  begin.fingerprint = begin.tensors = begin.nbytes = 0;
  send_begin(begin);
  expect_blamed("a plan that this rank does not hold");
}

TEST_F(BadSource, ThatPassesNoMemoryIsCaught) {
  start();
  send_begin(a_begin());
  send_manifest();
  source_->send(FrameType::kGo, 1, 0);
  expect_blamed("0 descriptors, 2 were expected");
}

TEST_F(BadSource, ThatPassesSomethingElseThanMemoryIsCaughtAndNothingStaysOpen) {
  const int before = open_descriptors();
  start();
  send_begin(a_begin());
  send_manifest();
  const OwnedFd null(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const std::array<int, 2> passed{null.get(), null.get()};
  for (int i = 0; i < 3; ++i) source_->send(FrameType::kDescriptors, 1, 0, {}, passed);
  source_->send(FrameType::kGo, 1, 0);
  expect_blamed("memfd");
  EXPECT_EQ(open_descriptors(), before + 1);
}

TEST_F(BadSource, ThatPassesMemoryToASyncWithoutBucketsLeavesNothingOpen) {
  const int before = open_descriptors();
  start();
  Begin begin = a_begin();
  begin.comm_generation = 0;
  begin.fingerprint = begin.tensors = begin.nbytes = 0;  // an empty manifest "follows"
  begin.bucket_bytes = kAlignment;
  into_.tensors.clear();
  send_begin(begin);
  const std::array<int, 2> passed{0, 1};
  source_->send(FrameType::kDescriptors, 1, 0, {}, passed);
  source_->send(FrameType::kGo, 1, 0);
  source_->send(FrameType::kCommit, 1, 0);
  const Outcome outcome = get(std::move(got_));
  EXPECT_TRUE(outcome.ok) << outcome;
  EXPECT_EQ(open_descriptors(), before);
}

TEST_F(BadSource, ThatLeavesAPlanWhichIsNoGeneratorsIsCaught) {
  start(true);
  send_begin(a_begin());
  send_manifest();
  const auto shm = ShmCommunicator::create(2, 1024, {receiver_rank(0)}, kSource);
  const std::array<int, 2> passed{shm->control_fd(), shm->data_fd()};
  source_->send(FrameType::kDescriptors, 1, 0, {}, passed);
  source_->send(FrameType::kDeviate, 1, 0);
  source_->send(FrameType::kGo, 1, 0);
  expect_blamed("left its plan");
}

TEST_F(BadSource, ThatSpeaksOfOtherSyncsIsNotListenedTo) {
  start();
  // Everything that would move the call on, under other numbers.
  for (const std::uint64_t sync : {std::uint64_t{0}, std::uint64_t{2}}) {
    source_->send(FrameType::kGo, sync, 0);
    source_->send(FrameType::kCommit, sync, 0);
    source_->send(FrameType::kManifest, sync, 0, manifest_.serialize(0, manifest_.size()));
    source_->send(FrameType::kDeviate, sync, 0);
    source_->send(FrameType::kBucket, sync, 0, encode(BucketHeader{}));
    source_->send(FrameType::kBegin, sync, call_ + 1, encode(a_begin()));  // another call's
  }
  Begin begin = a_begin();
  begin.comm_generation = 0;
  begin.fingerprint = begin.tensors = begin.nbytes = 0;  // an empty manifest "follows"
  begin.bucket_bytes = kAlignment;
  into_.tensors.clear();
  source_->send(FrameType::kBegin, 3, call_, encode(begin));
  EXPECT_EQ(next_frame(*source_)->type, FrameType::kReady);
  source_->send(FrameType::kCommit, 2, 0);
  source_->send(FrameType::kGo, 2, 0);
  EXPECT_FALSE(next_frame(*source_, 100ms)) << "it does not go on";
  source_->send(FrameType::kGo, 3, 0);
  EXPECT_EQ(next_frame(*source_)->type, FrameType::kDone);
  source_->send(FrameType::kCommit, 3, 0);
  const Outcome outcome = get(std::move(got_));
  EXPECT_TRUE(outcome.ok) << outcome;
}

TEST_F(BadSource, ThatSendsRandomFramesEndsTheCallAndNothingElse) {
  std::mt19937_64 random(6);
  for (int round = 0; round < 60; ++round) {
    int ends[2] = {-1, -1};
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    Link source{OwnedFd(ends[0])};
    WeightReceiver receiver(identity_of(receiver_rank(0), 1));
    receiver.connect(OwnedFd(ends[1]));
    auto got = std::async(std::launch::async, [&] {
      return run_receiver(receiver, 0, nullptr, {.into = &into_, .pull = round % 2 == 0, .timeout = 5s});
    });
    source.send(FrameType::kWelcome, 0, 0);
    std::uint64_t call = 0;
    while (const auto frame = next_frame(source)) {
      if (frame->type != FrameType::kJoin) continue;
      Join join;
      decode(frame->payload, join);
      call = join.call;
      break;
    }
    Begin begin = a_begin();
    begin.streaming = random() % 2;
    source.send(FrameType::kBegin, 1, call, encode(begin));
    if (random() % 4 != 0) source.send(FrameType::kManifest, 1, 0, manifest_.serialize(0, manifest_.size()));
    for (int i = 0; i < 20; ++i) {
      std::vector<std::byte> payload(random() % 60);
      for (std::byte& b : payload) b = static_cast<std::byte>(random() % 4);
      const std::array<int, 1> passed{0};
      source.send(static_cast<FrameType>(1 + random() % 18), random() % 3, random() % 4, payload,
                  random() % 5 == 0 ? std::span<const int>(passed) : std::span<const int>());
    }
    source.close();
    const Outcome outcome = get(std::move(got));
    EXPECT_FALSE(outcome.ok);
  }
}

// Driven by hand, without a device.
INSTANTIATE_TEST_SUITE_P(Over, Sessions, ::testing::Values("shm", "gloo"),
                         [](const auto& one) { return std::string(one.param); });

}  // namespace
}  // namespace fastsync::testing

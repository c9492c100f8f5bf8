// A control connection: whole frames in order, descriptors that never leak, and the other end's death.
#include "control/link.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <random>

#include "common/error.h"
#include "support/bounds.h"
#include "support/process.h"

namespace fastsync::testing {
namespace {

using namespace std::chrono_literals;

struct Pair {
  OwnedFd a;
  OwnedFd b;
};

Pair socket_pair(int send_buffer_bytes = 0) {
  int ends[2] = {-1, -1};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) throw std::runtime_error("socketpair");
  if (send_buffer_bytes > 0) {
    for (const int fd : ends) ::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &send_buffer_bytes, sizeof(send_buffer_bytes));
  }
  return {OwnedFd(ends[0]), OwnedFd(ends[1])};
}

std::vector<std::byte> pattern(std::size_t nbytes, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(nbytes);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  return bytes;
}

std::vector<std::byte> frame_bytes(FrameType type, std::span<const std::byte> payload, std::uint32_t descriptors = 0) {
  FrameHeader header;
  header.type = type;
  header.payload_bytes = static_cast<std::uint32_t>(payload.size());
  header.descriptor_count = descriptors;
  std::vector<std::byte> bytes(kFrameHeaderBytes);
  encode_frame_header(header, bytes.data());
  bytes.insert(bytes.end(), payload.begin(), payload.end());
  return bytes;
}

void write_all(int fd, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    ASSERT_GT(n, 0) << errno_text(errno);
    bytes = bytes.subspan(static_cast<std::size_t>(n));
  }
}

// As a stranger would: `count` descriptors beside the bytes, whatever the frame says.
void send_with_descriptors(int socket, std::span<const std::byte> bytes, std::size_t count) {
  const int null = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  std::vector<int> fds(count, null);
  std::vector<char> control(CMSG_SPACE(sizeof(int) * count));
  iovec vector{const_cast<std::byte*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &vector;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* c = CMSG_FIRSTHDR(&message);
  c->cmsg_level = SOL_SOCKET;
  c->cmsg_type = SCM_RIGHTS;
  c->cmsg_len = CMSG_LEN(sizeof(int) * count);
  std::memcpy(CMSG_DATA(c), fds.data(), sizeof(int) * count);
  EXPECT_EQ(::sendmsg(socket, &message, MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size())) << errno_text(errno);
  ::close(null);
}

// Waits on the link itself, at most kLongTimeout.
template <typename Done>
bool wait_for(Link& link, Done done) {
  const auto end = Clock::now() + kLongTimeout;
  for (;;) {
    link.poll_now();
    if (done()) return true;
    if (Clock::now() > end) return false;
    Link* const links[] = {&link};
    wait_readable(links, -1, 50ms);
  }
}

// --- framing --------------------------------------------------------------------------------------------------------

TEST(Link, DeliversFramesWholeAndInOrderThroughATinySocketBuffer) {
  Pair sockets = socket_pair(4096);
  Link sender(std::move(sockets.a));
  Link receiver(std::move(sockets.b));
  constexpr std::uint64_t kFrames = 120;
  const auto size_of = [](std::uint64_t i) { return static_cast<std::size_t>(i * i * 37 % 70'000); };
  for (std::uint64_t i = 0; i < kFrames; ++i) sender.send(FrameType::kManifest, i, 2 * i, pattern(size_of(i), i));
  ASSERT_TRUE(sender.has_unsent());
  std::uint64_t next = 0;
  const auto end = Clock::now() + kLongTimeout;
  while (next < kFrames && Clock::now() < end) {
    sender.flush();
    receiver.poll_now();
    while (auto frame = receiver.receive()) {
      EXPECT_EQ(frame->type, FrameType::kManifest);
      EXPECT_EQ(frame->sync, next);
      EXPECT_EQ(frame->aux, 2 * next);
      ASSERT_EQ(frame->payload, pattern(size_of(next), next)) << "frame " << next;
      ++next;
    }
  }
  EXPECT_EQ(next, kFrames);
  EXPECT_FALSE(sender.has_unsent());
  EXPECT_FALSE(receiver.gone());
}

TEST(Link, DeliversAFrameThatComesByteByByte) {
  Pair sockets = socket_pair();
  Link receiver(std::move(sockets.a));
  const auto payload = pattern(100, 1);
  const auto bytes = frame_bytes(FrameType::kJoin, payload);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    receiver.poll_now();
    ASSERT_FALSE(receiver.receive()) << "after " << i << " bytes";
    write_all(sockets.b.get(), std::span(bytes).subspan(i, 1));
  }
  receiver.poll_now();
  const auto frame = receiver.receive();
  ASSERT_TRUE(frame);
  EXPECT_EQ(frame->payload, payload);
  EXPECT_FALSE(receiver.receive());
}

TEST(Link, DeliversThePayloadOfGreatestSize) {
  Pair sockets = socket_pair();
  Link sender(std::move(sockets.a));
  Link receiver(std::move(sockets.b));
  const auto payload = pattern(kMaxPayloadBytes, 3);
  sender.send(FrameType::kManifest, 1, 0, payload);
  sender.send(FrameType::kGo, 1, 0);
  std::vector<Frame> frames;
  const auto end = Clock::now() + kLongTimeout;
  while (frames.size() < 2 && Clock::now() < end) {
    sender.flush();
    receiver.poll_now();
    while (auto frame = receiver.receive()) frames.push_back(std::move(*frame));
  }
  ASSERT_EQ(frames.size(), 2U);
  EXPECT_EQ(frames[0].payload, payload);
  EXPECT_EQ(frames[1].type, FrameType::kGo);
}

TEST(Link, RefusesToSendAPayloadThatNobodyWouldTake) {
  Pair sockets = socket_pair();
  Link sender(std::move(sockets.a));
  const std::vector<std::byte> payload(kMaxPayloadBytes + 1);
  EXPECT_THROW(sender.send(FrameType::kManifest, 1, 0, payload), InternalError);
}

TEST(Link, HoldsNoMoreThanAFrameOfWhatAPeerPoursIn) {
  Pair sockets = socket_pair();
  Link receiver(std::move(sockets.a));
  ASSERT_EQ(::fcntl(sockets.b.get(), F_SETFL, O_NONBLOCK), 0);
  // A header that promises the greatest payload, and then far more than that, without receive() in between.
  FrameHeader header;
  header.type = FrameType::kManifest;
  header.payload_bytes = kMaxPayloadBytes;
  std::vector<std::byte> bytes(kFrameHeaderBytes);
  encode_frame_header(header, bytes.data());
  write_all(sockets.b.get(), bytes);
  const std::vector<std::byte> flood(256 * 1024);
  std::size_t written = 0;
  int refused_in_a_row = 0;
  while (refused_in_a_row < 3 && written < 4 * kMaxPayloadBytes) {
    const ssize_t n = ::send(sockets.b.get(), flood.data(), flood.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n > 0) written += static_cast<std::size_t>(n);
    refused_in_a_row = n > 0 ? 0 : refused_in_a_row + 1;
    receiver.poll_now();
  }
  EXPECT_LT(written, 2 * kMaxPayloadBytes) << "the rest must wait in the peer's socket";
  EXPECT_TRUE(receiver.receive());
}

TEST(Link, ThrowsForBytesThatAreNotOurs) {
  const std::vector<std::string> others{
      "GET / HTTP/1.1\r\nHost: example.org\r\nUser-Agent: x\r\n\r\n",
      std::string(64, '\0'),
      std::string(64, '\xFF'),
      "\x16\x03\x01\x02" + std::string(60, 'T'),  // a TLS client
  };
  for (const std::string& text : others) {
    Pair sockets = socket_pair();
    Link receiver(std::move(sockets.a));
    write_all(sockets.b.get(), std::as_bytes(std::span(text)));
    receiver.poll_now();
    EXPECT_THROW((void)receiver.receive(), CommError) << text.substr(0, 20);
  }
}

// --- the end --------------------------------------------------------------------------------------------------------

TEST(Link, DeliversWhatArrivedBeforeTheEnd) {
  Pair sockets = socket_pair();
  Link receiver(std::move(sockets.a));
  {
    Link sender(std::move(sockets.b));
    for (std::uint64_t i = 0; i < 3; ++i) sender.send(FrameType::kDone, i, 0, pattern(1000, i));
  }
  ASSERT_TRUE(wait_for(receiver, [&] { return receiver.gone(); }));
  for (std::uint64_t i = 0; i < 3; ++i) {
    const auto frame = receiver.receive();
    ASSERT_TRUE(frame);
    EXPECT_EQ(frame->sync, i);
  }
  EXPECT_FALSE(receiver.receive());
}

TEST(Link, DropsHalfAFrameAtTheEnd) {
  for (const std::size_t cut : {std::size_t{1}, kFrameHeaderBytes - 1, kFrameHeaderBytes, kFrameHeaderBytes + 99}) {
    Pair sockets = socket_pair();
    Link receiver(std::move(sockets.a));
    const auto bytes = frame_bytes(FrameType::kJoin, pattern(100, 1));
    write_all(sockets.b.get(), std::span(bytes).first(cut));
    sockets.b.reset();
    ASSERT_TRUE(wait_for(receiver, [&] { return receiver.gone(); })) << cut;
    EXPECT_FALSE(receiver.receive()) << cut;
  }
}

TEST(Link, StillReadsWhatThePeerSaidBeforeAFailedSend) {
  Pair sockets = socket_pair();
  Link link(std::move(sockets.a));
  write_all(sockets.b.get(), frame_bytes(FrameType::kBye, pattern(5, 1)));
  sockets.b.reset();
  link.send(FrameType::kStall, 1, 2);
  EXPECT_TRUE(link.gone());
  EXPECT_FALSE(link.has_unsent());
  link.poll_now();
  const auto frame = link.receive();
  ASSERT_TRUE(frame);
  EXPECT_EQ(frame->type, FrameType::kBye);
}

TEST(Link, ClosedTakesEveryCall) {
  Pair sockets = socket_pair();
  Link link(std::move(sockets.a));
  link.close();
  link.close();
  EXPECT_TRUE(link.gone());
  link.send(FrameType::kGo, 1, 0);
  link.flush();
  link.poll_now();
  EXPECT_FALSE(link.receive());
  EXPECT_FALSE(link.has_unsent());
  Link* const links[] = {&link};
  wait_readable(links, -1, 1ms);
}

// --- descriptors ----------------------------------------------------------------------------------------------------

TEST(Link, PassesDescriptorsWithTheirFrame) {
  Pair sockets = socket_pair();
  Link sender(std::move(sockets.a));
  Link receiver(std::move(sockets.b));
  int ends[2] = {-1, -1};
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const OwnedFd read_end(ends[0]);
  OwnedFd write_end(ends[1]);
  sender.send(FrameType::kJoin, 1, 0);
  const std::array<int, 2> passed{write_end.get(), read_end.get()};
  sender.send(FrameType::kDescriptors, 2, 0, pattern(10, 1), passed);
  sender.send(FrameType::kGo, 3, 0);
  write_end.reset();  // the frame has its own
  std::vector<Frame> frames;
  ASSERT_TRUE(wait_for(receiver, [&] {
    while (auto frame = receiver.receive()) frames.push_back(std::move(*frame));
    return frames.size() == 3;
  }));
  EXPECT_TRUE(frames[0].descriptors.empty());
  EXPECT_TRUE(frames[2].descriptors.empty());
  ASSERT_EQ(frames[1].descriptors.size(), 2U);
  const int arrived = frames[1].descriptors[0].get();
  EXPECT_NE(::fcntl(arrived, F_GETFD) & FD_CLOEXEC, 0) << "a child of this process must not inherit it";
  ASSERT_EQ(::write(arrived, "x", 1), 1);
  char byte = 0;
  ASSERT_EQ(::read(read_end.get(), &byte, 1), 1);
  EXPECT_EQ(byte, 'x');
}

TEST(Link, ClosesDescriptorsThatNobodyTakes) {
  const int before = open_descriptors();
  {
    Pair sockets = socket_pair();
    Link sender(std::move(sockets.a));
    Link receiver(std::move(sockets.b));
    const std::array<int, 2> passed{0, 1};
    for (int i = 0; i < 10; ++i) sender.send(FrameType::kDescriptors, 1, 0, {}, passed);
    int taken = 0;
    ASSERT_TRUE(wait_for(receiver, [&] {
      while (receiver.receive()) ++taken;  // dropped as they come
      return taken == 10;
    }));
    EXPECT_EQ(open_descriptors(), before + 2);
  }
  EXPECT_EQ(open_descriptors(), before);
}

TEST(Link, ClosesDescriptorsThatItCouldNotSend) {
  const int before = open_descriptors();
  {
    Pair sockets = socket_pair(4096);
    Link sender(std::move(sockets.a));
    const std::array<int, 2> passed{0, 1};
    for (int i = 0; i < 20; ++i) sender.send(FrameType::kDescriptors, 1, 0, pattern(10'000, 1), passed);
    ASSERT_TRUE(sender.has_unsent());
    ASSERT_GT(open_descriptors(), before + 2);
  }
  EXPECT_EQ(open_descriptors(), before);
}

TEST(Link, MovesWithItsDescriptors) {
  const int before = open_descriptors();
  {
    const std::array<int, 1> passed{0};
    const auto full = [&] {
      Pair sockets = socket_pair(4096);
      Link link(std::move(sockets.a));
      for (int i = 0; i < 20; ++i) link.send(FrameType::kDescriptors, 1, 0, pattern(10'000, 1), passed);
      send_with_descriptors(sockets.b.get(), frame_bytes(FrameType::kGo, {}), 3);
      link.poll_now();
      return link;
    };
    Link first = full();
    first = full();  // what the first one held is closed
  }
  EXPECT_EQ(open_descriptors(), before);
}

TEST(Link, IsNotFilledByAFloodOfDescriptors) {
  const int before = open_descriptors();
  {
    Pair sockets = socket_pair();
    Link receiver(std::move(sockets.a));
    const auto bytes = frame_bytes(FrameType::kJoin, pattern(200, 1));
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      send_with_descriptors(sockets.b.get(), std::span(bytes).subspan(i, 1), i % 5 == 0 ? 64 : 4);
      receiver.poll_now();
      ASSERT_LE(open_descriptors(), before + 2 + 64);
    }
    ASSERT_TRUE(wait_for(receiver, [&] { return receiver.receive().has_value(); }));
  }
  EXPECT_EQ(open_descriptors(), before);
}

TEST(Link, ThrowsForDescriptorsThatWereAnnouncedAndNotPassed) {
  Pair sockets = socket_pair();
  Link receiver(std::move(sockets.a));
  write_all(sockets.b.get(), frame_bytes(FrameType::kDescriptors, {}, 2));
  receiver.poll_now();
  EXPECT_THROW((void)receiver.receive(), CommError);
}

// --- processes ------------------------------------------------------------------------------------------------------

// A process that connects to `name`; Link to it from this side.
std::unique_ptr<Link> accept_within(int listener) {
  const auto end = Clock::now() + kLongTimeout;
  while (Clock::now() < end) {
    wait_readable({}, listener, 50ms);
    if (auto fd = accept_one(listener)) return std::make_unique<Link>(std::move(*fd));
  }
  throw std::runtime_error("nobody connected");
}

TEST(Link, NoticesThatAProcessEndedWhoseChildHoldsTheSocket) {
  std::string name;
  const OwnedFd listener = listen_unix(name);
  const Signal child_runs;
  const Signal child_may_end;
  const Process peer([&] {
    const auto socket = connect_unix(name);
    if (!socket) throw std::runtime_error("cannot connect");
    const Process child([&] {
      child_runs.give();
      child_may_end.take();
    });
    ::pause();
  });
  const auto watched = accept_within(listener.get());
  watched->watch_process();
  Link unwatched(OwnedFd(::dup(watched->fd())));
  child_runs.take();
  ASSERT_NE(watched->peer_pid(), 0);
  watched->poll_now();
  ASSERT_FALSE(watched->gone());

  const auto killed = Clock::now();
  peer.kill(SIGKILL);
  EXPECT_TRUE(wait_for(*watched, [&] { return watched->gone(); }));
  EXPECT_LT(Clock::now() - killed, kAtOnce);
  EXPECT_TRUE(watched->process_ended());
  unwatched.poll_now();
  EXPECT_FALSE(unwatched.gone()) << "the socket alone does not say it";
  child_may_end.give();
}

TEST(Link, DeliversEverythingThatADeadProcessSent) {
  std::string name;
  const OwnedFd listener = listen_unix(name);
  const Signal watched;
  constexpr std::uint64_t kFrames = 20;
  Process peer([&] {
    auto socket = connect_unix(name);
    if (!socket) throw std::runtime_error("cannot connect");
    watched.take();
    Link link(std::move(*socket));
    const std::array<int, 2> passed{0, 1};
    for (std::uint64_t i = 0; i < kFrames; ++i) {
      link.send(FrameType::kDescriptors, i, 0, pattern(100, i),
                i % 2 == 0 ? std::span<const int>(passed) : std::span<const int>());
    }
  });
  const auto link = accept_within(listener.get());
  link->watch_process();
  ASSERT_GE(link->pidfd(), 0);
  watched.give();
  pollfd ended{link->pidfd(), POLLIN, 0};
  ASSERT_EQ(::poll(&ended, 1, 30'000), 1);
  // Once: whoever sees gone() acts on it, and must have seen the frames.
  link->poll_now();
  std::uint64_t next = 0;
  while (!link->gone()) {
    while (auto frame = link->receive()) EXPECT_EQ(frame->sync, next++);
    link->poll_now();
  }
  while (auto frame = link->receive()) EXPECT_EQ(frame->sync, next++);
  EXPECT_EQ(next, kFrames);
  EXPECT_TRUE(link->process_ended());
  EXPECT_EQ(peer.join(), 0);
}

TEST(Link, KnowsWhoIsAtTheOtherEndOfAUnixSocket) {
  std::string name;
  const OwnedFd listener = listen_unix(name);
  auto client = connect_unix(name);
  ASSERT_TRUE(client);
  const Link there(std::move(*client));
  const auto here = accept_within(listener.get());
  for (const Link* link : {&there, static_cast<const Link*>(here.get())}) {
    EXPECT_TRUE(link->is_unix());
    EXPECT_EQ(link->peer_pid(), ::getpid());
    EXPECT_EQ(link->peer_uid(), ::geteuid());
  }
}

// --- waiting --------------------------------------------------------------------------------------------------------

TEST(WaitReadable, ReturnsForDataForTheListenerAndForTheEnd) {
  Pair quiet_sockets = socket_pair();
  Link quiet(std::move(quiet_sockets.a));
  Pair sockets = socket_pair();
  Link link(std::move(sockets.a));
  Link* const links[] = {&quiet, &link};
  const auto waited = [&](int listener) {
    const auto start = Clock::now();
    wait_readable(links, listener, kLongTimeout);
    return Clock::now() - start;
  };
  write_all(sockets.b.get(), frame_bytes(FrameType::kGo, {}));
  EXPECT_LT(waited(-1), kLongTimeout / 2);
  link.poll_now();
  ASSERT_TRUE(link.receive());

  std::string name;
  const OwnedFd listener = listen_unix(name);
  const auto client = connect_unix(name);
  ASSERT_TRUE(client);
  EXPECT_LT(waited(listener.get()), kLongTimeout / 2);

  sockets.b.reset();
  EXPECT_LT(waited(-1), kLongTimeout / 2);
}

TEST(WaitReadable, EndsAtItsTimeout) {
  Pair sockets = socket_pair();
  Link link(std::move(sockets.a));
  Link* const links[] = {&link};
  const auto start = Clock::now();
  wait_readable(links, -1, 20ms);
  const auto took = Clock::now() - start;
  EXPECT_GE(took, 20ms);
  EXPECT_LT(took, kLongTimeout / 2);
  wait_readable(links, -1, -1ns);  // a deadline that has passed
}

TEST(WaitReadable, ReturnsWhenAFullSocketTakesMore) {
  Pair sockets = socket_pair(4096);
  Link link(std::move(sockets.a));
  for (int i = 0; i < 20; ++i) link.send(FrameType::kManifest, 1, 0, pattern(10'000, 1));
  ASSERT_TRUE(link.has_unsent());
  Link* const links[] = {&link};
  std::vector<std::byte> sink(1 << 20);
  const auto end = Clock::now() + kLongTimeout;
  while (link.has_unsent() && Clock::now() < end) {
    (void)!::recv(sockets.b.get(), sink.data(), sink.size(), MSG_DONTWAIT);
    wait_readable(links, -1, kLongTimeout);
    link.flush();
  }
  EXPECT_FALSE(link.has_unsent());
  EXPECT_LT(Clock::now(), end);
}

// --- listening and connecting ---------------------------------------------------------------------------------------

TEST(ListenUnix, GivesEveryListenerItsOwnName) {
  std::string first;
  std::string second;
  const OwnedFd a = listen_unix(first);
  const OwnedFd b = listen_unix(second);
  EXPECT_NE(first, second);
}

TEST(ConnectUnix, SaysThatNobodyListens) {
  std::string name;
  OwnedFd listener = listen_unix(name);
  listener.reset();
  EXPECT_FALSE(connect_unix(name));
  EXPECT_FALSE(connect_unix("fastsync-nobody-ever-listened-here"));
}

TEST(AcceptOne, DoesNotWait) {
  std::string name;
  const OwnedFd listener = listen_unix(name);
  EXPECT_FALSE(accept_one(listener.get()));
}

TEST(Tcp, CarriesFramesBothWays) {
  int port = 0;
  const OwnedFd listener = listen_tcp(port);
  ASSERT_GT(port, 0);
  auto client = connect_tcp("127.0.0.1", port, 5s);
  ASSERT_TRUE(client);
  Link there(std::move(*client));
  const auto here = accept_within(listener.get());
  EXPECT_FALSE(here->is_unix());
  here->watch_process();  // impossible, and no harm
  EXPECT_LT(here->pidfd(), 0);
  there.send(FrameType::kHello, 0, 0, encode(Hello{}));
  std::optional<Frame> frame;
  ASSERT_TRUE(wait_for(*here, [&] { return (frame = here->receive()).has_value(); }));
  EXPECT_EQ(frame->type, FrameType::kHello);
  here->send(FrameType::kWelcome, 9, 0);
  ASSERT_TRUE(wait_for(there, [&] { return (frame = there.receive()).has_value(); }));
  EXPECT_EQ(frame->sync, 9U);
}

TEST(Tcp, SaysThatNobodyListens) {
  int port = 0;
  OwnedFd listener = listen_tcp(port);
  listener.reset();
  EXPECT_FALSE(connect_tcp("127.0.0.1", port, 5s));
  EXPECT_FALSE(connect_tcp("not-an-address", port, 5s));
}

}  // namespace
}  // namespace fastsync::testing

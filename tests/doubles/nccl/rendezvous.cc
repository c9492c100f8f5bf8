#include "doubles/nccl/rendezvous.h"

#include <poll.h>
#include <pthread.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <span>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "doubles/nccl/report.h"
#include "doubles/nccl/seqpacket.h"

namespace fastsync::fake_nccl {
namespace {

constexpr std::string_view kIdPrefix = "fastsync-fake-nccl-";
constexpr std::size_t kRandomBytes = 16;
constexpr std::size_t kIdLength = kIdPrefix.size() + 2 * kRandomBytes;
constexpr int kMaxRanks = static_cast<int>(kMaxDescriptors);  // one window and nranks - 1 sockets in a message

struct Hello {
  std::int32_t rank = 0;
  std::int32_t nranks = 0;
  std::int32_t version = 0;
  std::int32_t may_share_device = 0;
  DeviceUuid uuid{};
};

struct Verdict {
  std::int32_t result = 0;
  std::array<char, 508> text{};
};

template <typename Message>
std::span<std::byte> bytes_of(Message* message) {
  return std::as_writable_bytes(std::span(message, 1));
}
template <typename Message>
std::span<const std::byte> bytes_of(const Message& message) {
  return std::as_bytes(std::span(&message, 1));
}

std::string version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

std::string uuid_text(const DeviceUuid& uuid) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text = "GPU-";
  for (std::size_t i = 0; i < uuid.size(); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += kDigits[uuid[i] >> 4];
    text += kDigits[uuid[i] & 15];
  }
  return text;
}

struct Guest {
  OwnedFd socket;
  Hello hello;
  bool introduced = false;
};

// Empty: they fit together. Ranks that cannot even be told apart are refused as they come.
std::string mismatch(const std::vector<Guest>& ranks) {
  for (const Guest& rank : ranks) {
    const Hello& first = ranks.front().hello;
    if (rank.hello.version != first.version) {
      return "Mismatched NCCL version detected: rank 0 has " + version_text(first.version) + ", rank " +
             std::to_string(rank.hello.rank) + " has " + version_text(rank.hello.version);
    }
  }
  for (const Guest& one : ranks) {
    for (const Guest& other : ranks) {
      if (one.hello.rank >= other.hello.rank || one.hello.uuid != other.hello.uuid) continue;
      if (one.hello.may_share_device != 0 && other.hello.may_share_device != 0) continue;
      const std::string both = "rank " + std::to_string(one.hello.rank) + " and rank " +
                               std::to_string(other.hello.rank) + " both on CUDA device " + uuid_text(one.hello.uuid);
      return one.hello.version >= 23003 ? "Multiple Ranks are using the same GPU/Partition: " + both
                                        : "Duplicate GPU detected: " + both;
    }
  }
  return {};
}

class Server;
void forget(const Server* server);

// One unique id. Its thread ends when all ranks were answered, or when nobody waits and nobody will. It is joined by
// whoever closes the id; where ranks still waited then, it is the thread that forgets the server, in the end.
class Server {
 public:
  explicit Server(OwnedFd listener) : listener_(std::move(listener)), wake_(make_event()) {
    journal().live("rendezvous", 1);
    thread_ = std::thread([this] {
      ::pthread_setname_np(::pthread_self(), "fake-nccl-root");
      serve();
      if (finish()) forget(this);  // the last that is done with `this`
    });
  }
  ~Server() {  // of a finished one
    if (thread_.get_id() == std::this_thread::get_id()) {
      thread_.detach();
    } else {
      thread_.join();
    }
    journal().live("rendezvous", -1);
  }
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Somebody has to join it.
  [[nodiscard]] bool finished() const {
    const std::scoped_lock lock(mutex_);
    return finished_ && !forgets_itself_;
  }
  // Ends when no rank waits here. True: that was at once, and somebody has to join it.
  [[nodiscard]] bool abandon() {
    std::unique_lock lock(mutex_);
    if (forgets_itself_) return false;
    abandoned_ = true;
    watched_ = true;
    looked_ = false;
    signal_event(wake_.get());
    changed_.wait(lock, [this] { return finished_ || looked_; });
    watched_ = false;
    return finished_;
  }

 private:
  // True: nobody will join the thread.
  [[nodiscard]] bool finish() {
    const std::scoped_lock lock(mutex_);
    finished_ = true;
    forgets_itself_ = abandoned_ && !watched_;
    changed_.notify_all();
    return forgets_itself_;
  }

  void serve() {
    bool asked = false;  // by abandon(): it wants to know who is left once everything that has happened was seen
    for (;;) {
      std::vector<pollfd> waiting{{wake_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
      for (const Guest& guest : guests_) waiting.push_back({guest.socket.get(), POLLIN, 0});
      const int ready = ::poll(waiting.data(), waiting.size(), asked ? 0 : -1);
      if (ready < 0) continue;  // EINTR
      if (waiting[0].revents != 0) {
        drain_event(wake_.get());
        asked = true;
      }
      // Backwards, because a guest that has left is erased.
      for (std::size_t i = guests_.size(); i-- > 0;) {
        if (waiting[i + 2].revents == 0) continue;
        Guest& guest = guests_[i];
        if (guest.introduced || !receive_message(guest.socket.get(), bytes_of(&guest.hello))) {
          guests_.erase(guests_.begin() + static_cast<std::ptrdiff_t>(i));  // it has given up: its place is free again
          continue;
        }
        guest.introduced = true;
      }
      if (waiting[1].revents != 0) {
        if (OwnedFd socket = accept_own(listener_.get())) guests_.push_back({std::move(socket), {}, false});
      }
      if (answered()) break;
      const std::scoped_lock lock(mutex_);
      if (abandoned_ && guests_.empty() && waiting[1].revents == 0) break;
      if (!asked || ready > 0) continue;
      asked = false;
      looked_ = true;
      changed_.notify_all();
    }
    // Nobody can come any more: whoever still waits here sees the end of its connection.
    guests_.clear();
    listener_.reset();
  }

  // True when there is nothing left to do.
  bool answered() {
    std::vector<const Guest*> known;
    for (const Guest& guest : guests_) {
      if (guest.introduced) known.push_back(&guest);
    }
    if (known.empty()) return false;
    const int nranks = known.front()->hello.nranks;
    std::vector<int> seen(static_cast<std::size_t>(nranks), 0);
    for (const Guest* guest : known) {
      const Hello& hello = guest->hello;
      if (hello.nranks != nranks) {
        return refuse(ncclRemoteError, "mismatch in the number of ranks: rank " +
                                           std::to_string(known.front()->hello.rank) + " says " +
                                           std::to_string(nranks) + ", rank " + std::to_string(hello.rank) + " says " +
                                           std::to_string(hello.nranks));
      }
      if (++seen[static_cast<std::size_t>(hello.rank)] > 1) {
        return refuse(ncclRemoteError,
                      "rank " + std::to_string(hello.rank) + " of " + std::to_string(nranks) + " has come twice");
      }
    }
    if (known.size() < static_cast<std::size_t>(nranks)) return false;
    std::erase_if(guests_, [](const Guest& guest) { return !guest.introduced; });
    std::ranges::sort(guests_, {}, [](const Guest& guest) { return guest.hello.rank; });
    if (std::string reason = mismatch(guests_); !reason.empty()) return refuse(ncclInvalidUsage, reason);
    return introduce(nranks);
  }

  bool refuse(ncclResult_t result, const std::string& text) {
    Verdict verdict;
    verdict.result = static_cast<std::int32_t>(result);
    text.copy(verdict.text.data(), verdict.text.size() - 1);
    for (const Guest& guest : guests_) (void)send_message(guest.socket.get(), bytes_of(verdict));
    return true;
  }

  // Gives every rank the window and its sockets, in the order of the other ranks.
  bool introduce(int nranks) {
    const auto count = static_cast<std::size_t>(nranks);
    OwnedFd window;
    std::vector<std::vector<OwnedFd>> sockets(count);
    for (auto& row : sockets) row.resize(count);
    try {
      window = Window::create(nranks);
    } catch (const std::system_error& error) {
      return refuse(ncclSystemError, error.what());
    }
    for (std::size_t i = 0; i < count; ++i) {
      for (std::size_t j = i + 1; j < count; ++j) {
        if (!socket_pair(&sockets[i][j], &sockets[j][i])) {
          return refuse(ncclSystemError, std::string("cannot connect the ranks: ") + std::strerror(errno));
        }
      }
    }
    const Verdict welcome;
    for (std::size_t i = 0; i < count; ++i) {
      std::vector<int> descriptors{window.get()};
      for (std::size_t j = 0; j < count; ++j) {
        if (j != i) descriptors.push_back(sockets[i][j].get());
      }
      (void)send_message(guests_[i].socket.get(), bytes_of(welcome), descriptors);
    }
    return true;
  }

  OwnedFd listener_;
  OwnedFd wake_;
  std::vector<Guest> guests_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool abandoned_ = false;
  bool looked_ = false;  // at its guests, since it was abandoned
  bool finished_ = false;
  bool watched_ = false;  // somebody is in abandon()
  bool forgets_itself_ = false;
  std::thread thread_;
};

struct Servers {
  std::mutex mutex;
  std::map<std::string, std::unique_ptr<Server>, std::less<>> by_name;
  pid_t owner = ::getpid();
};
// Never destroyed: a server whose ranks never came ends with the process.
Servers& servers() {
  static auto* all = new Servers();
  return *all;
}

void forget(const Server* server) {
  Servers& all = servers();
  const std::scoped_lock lock(all.mutex);
  std::erase_if(all.by_name, [&](const auto& one) { return one.second.get() == server; });
}

std::string name_of(const ncclUniqueId& id) {
  return std::string(id.internal, ::strnlen(id.internal, sizeof id.internal));
}

}  // namespace

bool is_unique_id(const ncclUniqueId& id) noexcept {
  const std::string_view name(id.internal, ::strnlen(id.internal, sizeof id.internal));
  return name.size() == kIdLength && name.substr(0, kIdPrefix.size()) == kIdPrefix;
}

ncclResult_t open_rendezvous(ncclUniqueId* id, std::string* why) {
  std::array<unsigned char, kRandomBytes> random{};
  if (::getrandom(random.data(), random.size(), 0) != static_cast<ssize_t>(random.size())) {
    *why = std::string("cannot draw a unique id: ") + std::strerror(errno);
    return ncclSystemError;
  }
  *id = {};
  kIdPrefix.copy(id->internal, kIdPrefix.size());
  for (std::size_t i = 0; i < random.size(); ++i) {
    std::snprintf(id->internal + kIdPrefix.size() + 2 * i, 3, "%02x", random[i]);
  }
  const std::string name = name_of(*id);
  OwnedFd listener = listen_abstract(name);
  if (!listener) {
    *why = std::string("cannot listen for the other ranks: ") + std::strerror(errno);
    return ncclSystemError;
  }
  Servers& all = servers();
  const std::scoped_lock lock(all.mutex);
  std::erase_if(all.by_name, [](const auto& server) { return server.second->finished(); });
  all.by_name.emplace(name, std::make_unique<Server>(std::move(listener)));
  return ncclSuccess;
}

void close_rendezvous(const ncclUniqueId& id) noexcept {
  Servers& all = servers();
  const std::scoped_lock lock(all.mutex);
  if (all.owner != ::getpid()) return;  // forked: the threads stayed with the parent
  const auto found = all.by_name.find(name_of(id));
  if (found != all.by_name.end() && found->second->abandon()) all.by_name.erase(found);
  std::erase_if(all.by_name, [](const auto& server) { return server.second->finished(); });
}

ncclResult_t join_rendezvous(const ncclUniqueId& id, const Member& member, int wake_fd, Mesh* mesh, std::string* why) {
  if (member.nranks > kMaxRanks) {
    *why = "this double joins at most " + std::to_string(kMaxRanks) + " ranks";
    return ncclInternalError;
  }
  const OwnedFd socket = connect_abstract(name_of(id));
  Hello hello;
  hello.rank = member.rank;
  hello.nranks = member.nranks;
  hello.version = member.version;
  hello.may_share_device = member.may_share_device ? 1 : 0;
  hello.uuid = member.uuid;
  if (!socket || !send_message(socket.get(), bytes_of(hello))) {
    *why = std::string("cannot reach the process that made the unique id: ") + std::strerror(errno);
    return ncclRemoteError;
  }
  for (;;) {
    std::array<pollfd, 2> waiting{{{wake_fd, POLLIN, 0}, {socket.get(), POLLIN, 0}}};
    if (::poll(waiting.data(), waiting.size(), -1) < 0) continue;  // EINTR
    if (waiting[0].revents != 0) return ncclInProgress;
    if (waiting[1].revents != 0) break;
  }
  Verdict verdict;
  std::vector<OwnedFd> descriptors;
  if (!receive_message(socket.get(), bytes_of(&verdict), &descriptors)) {
    *why = "the process that made the unique id closed the connection before all ranks were there";
    return ncclRemoteError;
  }
  if (verdict.result != 0) {
    *why = verdict.text.data();
    return static_cast<ncclResult_t>(verdict.result);
  }
  if (descriptors.size() != static_cast<std::size_t>(member.nranks)) {
    *why = "expected " + std::to_string(member.nranks) + " descriptors, got " + std::to_string(descriptors.size());
    return ncclSystemError;
  }
  try {
    mesh->window = std::make_unique<Window>(descriptors.front().get(), member.nranks);
  } catch (const std::system_error& error) {
    *why = error.what();
    return ncclSystemError;
  }
  mesh->rank = member.rank;
  mesh->nranks = member.nranks;
  mesh->peers.resize(static_cast<std::size_t>(member.nranks));
  std::size_t next = 1;
  for (int rank = 0; rank < member.nranks; ++rank) {
    if (rank != member.rank) mesh->peers[static_cast<std::size_t>(rank)] = std::move(descriptors[next++]);
  }
  return ncclSuccess;
}

}  // namespace fastsync::fake_nccl

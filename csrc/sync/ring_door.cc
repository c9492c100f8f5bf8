#include "sync/ring_door.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "common/error.h"

namespace fastsync {

namespace {
constexpr std::size_t kMaxGuests = 4096;
constexpr std::size_t kMaxGuestBytes = 256 * 1024;  // a Hello, or the events of 1024 buckets
constexpr std::size_t kMaxOfferBytes = 256 * 1024;  // a ring's description, with as many events

void say_closed(Link& link, bool closed) noexcept {
  if (closed) {
    link.end_sending();
  } else {
    (void)OwnedFd::duplicate(link.fd()).release();  // for the rest of this process
  }
}
}  // namespace

// --- the leader's side ----------------------------------------------------------------------------------------------

RingHost::RingHost(std::shared_ptr<IpcCommunicator> ring, std::vector<int> followers, std::string token)
    : pid_(::getpid()), ring_(std::move(ring)), followers_(std::move(followers)), token_(std::move(token)) {
  listener_ = listen_unix(door_);
}

void RingHost::pump() {
  while (listener_) {
    auto fd = accept_one(listener_.get());
    if (!fd) break;
    if (guests_.size() >= kMaxGuests) continue;
    try {
      auto link = std::make_unique<Link>(std::move(*fd));
      if (link->peer_uid() != ::geteuid()) continue;  // only our own user may map our memory
      link->limit(kMaxGuestBytes, 0);
      guests_.push_back({std::move(link), std::nullopt, false});
    } catch (const CommError&) {
      continue;  // the connection broke before it said anything
    }
  }
  std::erase_if(guests_, [this](Guest& guest) { return !serve(guest); });
  if (listener_ && absent().empty()) listener_.reset();  // nobody else is to come
}

bool RingHost::serve(Guest& guest) {
  Link& link = *guest.link;
  link.poll_now();
  std::optional<Frame> frame;
  Hello hello;
  try {
    frame = link.receive();
    if (frame && frame->type == FrameType::kHello && !guest.index) decode(frame->payload, hello);
  } catch (const CommError&) {
    return false;
  }
  if (!frame) return guest.opened || !link.gone();
  if (!guest.index) {
    const auto found = std::find(followers_.begin(), followers_.end(), static_cast<int>(hello.rank));
    if (frame->type != FrameType::kHello || hello.token != token_ || found == followers_.end()) return false;
    const auto index = static_cast<std::uint32_t>(found - followers_.begin());
    if (std::any_of(guests_.begin(), guests_.end(), [&](const Guest& other) { return other.index == index; })) {
      return false;
    }
    const IpcDescriptor description = ring_->describe();
    std::vector<int> fds{ring_->control_fd(), ring_->data_fd()};
    if (description.memory.fd) fds.push_back(description.memory.fd.get());
    link.send(FrameType::kDescriptors, 0, index, description.encode(), fds);
    guest.index = index;
    return true;
  }
  if (frame->type != FrameType::kReady || guest.opened) return false;
  ring_->add_reader(*guest.index, decode_events(frame->payload, ring_->buffers()));
  guest.opened = true;
  return true;
}

std::vector<int> RingHost::absent() const {
  std::vector<int> ranks;
  for (std::size_t i = 0; i < followers_.size(); ++i) {
    const bool here = std::any_of(guests_.begin(), guests_.end(),
                                  [&](const Guest& guest) { return guest.opened && guest.index == i; });
    if (!here) ranks.push_back(followers_[i]);
  }
  return ranks;
}

void RingHost::append_links(std::vector<Link*>& links) const {
  for (const Guest& guest : guests_) {
    if (!guest.opened) links.push_back(guest.link.get());
  }
}

void RingHost::retire() noexcept {
  if (!ring_) return;
  if (::getpid() != pid_) {  // a forked child: the connections and the ring are the parent's
    guests_.clear();
    ring_.reset();
    return;
  }
  const bool closed = ring_->detach();
  std::vector<OwnedFd> others;
  for (const Guest& guest : guests_) {
    if (!guest.link->gone() && guest.index) others.push_back(OwnedFd::duplicate(guest.link->fd()));
  }
  for (const Guest& guest : guests_) say_closed(*guest.link, closed);
  IpcCommunicator::keep_for(std::move(ring_), others);
  guests_.clear();
  listener_.reset();
}

// --- a follower's side ----------------------------------------------------------------------------------------------

RingGuest::RingGuest(std::string door, int leader, Hello hello)
    : pid_(::getpid()), door_(std::move(door)), leader_(leader), hello_(std::move(hello)) {}

void RingGuest::pump() {
  if (!link_) {
    auto socket = connect_unix(door_);
    if (!socket) return;
    auto link = std::make_unique<Link>(std::move(*socket));
    if (link->peer_uid() != ::geteuid()) {
      throw CommError(concat("rank ", leader_, "'s socket belongs to user ", link->peer_uid(), ", this process to ",
                             ::geteuid(), "; run all ranks as one user"),
                      leader_);
    }
    link->limit(kMaxOfferBytes, 3);
    link->send(FrameType::kHello, 0, 0, fastsync::encode(hello_));
    link_ = std::move(link);
  }
  link_->poll_now();
  auto frame = link_->receive();
  if (!frame) return;
  if (frame->type != FrameType::kDescriptors || offer_) {
    throw CommError(concat("rank ", leader_, " sent a frame of type ", static_cast<int>(frame->type),
                           " where it hands out its ring"),
                    leader_);
  }
  if (frame->descriptors.size() < 2 || frame->descriptors.size() > 3) {
    throw CommError(concat("rank ", leader_, " passed ", frame->descriptors.size(), " descriptors, 2 were expected"),
                    leader_);
  }
  Offer offer;
  offer.ring = IpcDescriptor::decode(frame->payload);
  if (frame->descriptors.size() == 3) {
    offer.ring.memory.fd = std::move(frame->descriptors.back());
    frame->descriptors.pop_back();
  }
  offer.descriptors = std::move(frame->descriptors);
  offer.index = static_cast<std::uint32_t>(frame->aux);
  offer_ = std::move(offer);
}

RingGuest::Offer RingGuest::take_offer() { return std::move(offer_).value(); }

void RingGuest::answer(const std::vector<EventHandle>& events) {
  link_->send(FrameType::kReady, 0, 0, encode_events(events));
}

void RingGuest::retire(std::shared_ptr<IpcCommunicator> reader) noexcept {
  const bool closed = !reader || reader->detach();
  if (::getpid() == pid_ && link_) {
    say_closed(*link_, closed);
    if (reader && !link_->gone()) {
      const OwnedFd leader = OwnedFd::duplicate(link_->fd());
      IpcCommunicator::keep_for(std::move(reader), {&leader, 1});
    }
  }
  link_.reset();
}

}  // namespace fastsync

// Which calls of a rank and of its peers have met: state of the (group, source) in this process, not of a session.
//
// Every rank makes its calls in step. A call that failed on one rank before the others knew must still end one call of
// each of them, and no second one; also where one side closed its session and opened another between. So call and sync
// numbers go on over sessions, and so does what one side knows of the other:
//
//   the source      for each receiver, the failed syncs that none of its calls has met yet, and the newest of its calls
//                   that has met a sync
//   a receiver      failed syncs that it heard of outside a call, and calls that failed here before any sync met them;
//                   it tells the source of those again when it connects
//
// Where both sides have opened another session since, they start afresh: what failed before belongs to no later call, and
// a rank that had stayed away is not told of it.
//
// Ownership: shared by the sessions of one (group, source), one after the other. Threads: as the session that uses it.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <string>

#include "common/error.h"
#include "control/frame.h"

namespace fastsync {

// A receiver that never calls again must not grow its peers. Beyond it the oldest go, and calls no longer pair up.
inline constexpr std::size_t kMaxUnmet = 1024;

// A failed sync that a receiver had not joined.
struct MissedSync {
  std::uint64_t sync = 0;
  std::shared_ptr<const Failure> failure;
  bool sent = false;                   // over the connection that the receiver has now
  std::uint64_t call = 0;              // which it is about to end: sent, and the call came before it was read; 0: none
  std::uint64_t session = 0;           // of the source, in which it failed
  std::uint64_t receiver_session = 0;  // in which the receiver was then
};

// What the source knows of one receiver.
struct PeerCalls {
  std::uint64_t owner = 0;      // whose calls these are (ReceiverCalls::owner)
  std::uint64_t session = 0;    // in which it came last; 0: it never did, and is not known to have had one
  std::uint64_t last_call = 0;  // newest that has met a sync, or a failure
  std::deque<MissedSync> missed;
};

// The sessions of both sides in which something failed, as a receiver knows them.
struct Sessions {
  std::uint64_t own = 0;
  std::string source;  // its token
};

// A call that failed here before it learned which sync it belonged to.
struct UnmetCall {
  std::uint64_t call = 0;
  Failure failure;
  Sessions in;
};

// A failed sync that this rank heard of outside a call.
struct HeardFailure {
  Error error;
  Sessions in;
};

// What a receiver knows of its own calls.
struct ReceiverCalls {
  std::uint64_t owner = std::random_device()() | std::uint64_t{std::random_device()()} << 32U;
  std::uint64_t call = 0;           // counts its calls
  std::uint64_t last_sync = 0;      // newest it heard of
  std::deque<HeardFailure> missed;  // the next calls belong to them, oldest first
  std::deque<UnmetCall> unmet;      // oldest first
};

struct Pairing {
  std::uint64_t session = 1;  // counts this rank's sessions; whoever opens the next one counts it
  std::uint64_t sync = 0;     // counts the source's syncs
  std::map<int, PeerCalls> peers;
  ReceiverCalls receiver;
};

}  // namespace fastsync

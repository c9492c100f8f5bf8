// The error family. Every failure of the core is a fastsync::Error whose kind has one Python exception.
//
// An error says what, how much, which rank and tensor, and what to do. The structured part (kind, rank, phase) is
// what travels to the other ranks in a Fail frame; the text travels beside it, cut to kMaxMessageBytes.
#pragma once

#include <cstdint>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace fastsync {

inline constexpr std::size_t kMaxMessageBytes = 4096;

// Values travel on the wire: append, never renumber.
enum class ErrorKind : std::uint16_t {
  kInternal = 0,
  kInvalidArgument = 1,
  kManifestMismatch = 2,
  kChecksum = 3,
  kTimeout = 4,
  kPeerLost = 5,
  kPeerFailed = 6,
  kState = 7,
  kDevice = 8,
  kComm = 9,
};
inline constexpr std::uint16_t kErrorKindCount = 10;

class Error : public std::runtime_error {
 public:
  // `rank` is the global rank the failure is about (the lost, stuck, failing or mismatching one), -1 if none.
  Error(ErrorKind kind, const std::string& message, int rank = -1)
      : std::runtime_error(message), message_(std::make_shared<const std::string>(message)), kind_(kind), rank_(rank) {}
  // All of the text, where what() ends at its first NUL.
  [[nodiscard]] const std::string& message() const noexcept { return *message_; }
  [[nodiscard]] ErrorKind kind() const noexcept { return kind_; }
  [[nodiscard]] int rank() const noexcept { return rank_; }

 private:
  std::shared_ptr<const std::string> message_;  // shared: copying an exception must not throw
  ErrorKind kind_;
  int rank_;
};

template <ErrorKind K>
class ErrorOf : public Error {
 public:
  explicit ErrorOf(const std::string& message, int rank = -1) : Error(K, message, rank) {}
};
using InvalidArgument = ErrorOf<ErrorKind::kInvalidArgument>;
using ManifestMismatch = ErrorOf<ErrorKind::kManifestMismatch>;
using ChecksumError = ErrorOf<ErrorKind::kChecksum>;
using TimeoutError = ErrorOf<ErrorKind::kTimeout>;
using PeerLostError = ErrorOf<ErrorKind::kPeerLost>;
using PeerFailedError = ErrorOf<ErrorKind::kPeerFailed>;
using StateError = ErrorOf<ErrorKind::kState>;
using DeviceError = ErrorOf<ErrorKind::kDevice>;
using CommError = ErrorOf<ErrorKind::kComm>;
using InternalError = ErrorOf<ErrorKind::kInternal>;

// concat("tensor '", name, "' has ", n, " bytes") -> std::string.
template <typename... Parts>
[[nodiscard]] std::string concat(Parts&&... parts) {
  std::ostringstream out;
  (out << ... << std::forward<Parts>(parts));
  return std::move(out).str();
}

// "No such file or directory (errno 2)".
[[nodiscard]] std::string errno_text(int error_number);

}  // namespace fastsync

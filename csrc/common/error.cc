#include "common/error.h"

#include <cstring>

namespace fastsync {
namespace {

// strerror_r comes in two kinds: GNU returns the text, POSIX fills the buffer and returns a status. Overloads on the
// result pick the right reading whatever the C library is.
[[maybe_unused]] const char* text_of(const char* result, const char* /*buffer*/) { return result; }
[[maybe_unused]] const char* text_of(int status, const char* buffer) { return status == 0 ? buffer : "unknown error"; }

}  // namespace

std::string errno_text(int error_number) {
  char buffer[256] = "";
  const char* text = text_of(::strerror_r(error_number, buffer, sizeof(buffer)), buffer);
  return concat(text, " (errno ", error_number, ")");
}

}  // namespace fastsync

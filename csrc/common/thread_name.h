// Names the calling thread, so that `top -H`, gdb and a crash report say whose it is.
//
// Linux keeps 15 bytes; the rest is cut. Never fails: a thread without a name works as well.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <string_view>

namespace fastsync {

inline void set_thread_name(std::string_view name) noexcept {
  std::array<char, 16> text{};
  std::copy_n(name.data(), std::min(name.size(), text.size() - 1), text.data());
#if defined(__linux__)
  static_cast<void>(::pthread_setname_np(::pthread_self(), text.data()));
#endif
}

}  // namespace fastsync

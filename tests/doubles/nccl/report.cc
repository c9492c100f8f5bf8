#include "doubles/nccl/report.h"

#include <cstdlib>
#include <mutex>
#include <utility>

namespace fastsync::fake_nccl {
namespace {

std::mutex g_mutex;
// Never destroyed: threads of the double may still run while the process exits.
std::string& newest() {
  static auto* text = new std::string();
  return *text;
}

}  // namespace

fake::Journal& journal() {
  static fake::Journal* const kJournal = [] {
    auto* made = new fake::Journal("nccl");
    std::atexit([] { journal().write_if_asked(); });
    return made;
  }();
  return *kJournal;
}

ncclResult_t failed(ncclResult_t result, std::string text) {
  const std::scoped_lock lock(g_mutex);
  newest() = std::move(text);
  return result;
}

const char* last_error() {
  static thread_local std::string mine;
  const std::scoped_lock lock(g_mutex);
  mine = newest();
  return mine.c_str();
}

}  // namespace fastsync::fake_nccl

// What fake_cuda_internal.h promises.
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "doubles/cuda/driver.h"
#include "doubles/cuda/fake_cuda_internal.h"

using namespace fastsync::fake;

namespace {

std::size_t copy_text(const std::string& text, char* buffer, std::size_t n) {
  if (buffer == nullptr || n == 0) return text.size();
  const std::size_t kept = std::min(text.size(), n - 1);
  std::memcpy(buffer, text.data(), kept);
  buffer[kept] = '\0';
  return text.size();
}

}  // namespace

const int fastsync_fake_cuda = 1;

CUresult fastsync_fake_enqueue(CUstream handle, const char* what, fastsync_fake_run run, void* user,
                               fastsync_fake_release release) {
  const auto give_back = [&](CUresult result) {
    if (release != nullptr) release(user);
    return result;
  };
  try {
    const auto stream = stream_of(current_context(), handle);
    if (stream == nullptr || run == nullptr) return give_back(CUDA_ERROR_INVALID_HANDLE);
    if (const CUresult state = stream->context().state(); state != CUDA_SUCCESS) return give_back(state);
    Work work;
    work.what = what;
    work.run = [run, user](fastsync_fake_op& op) { return run(user, &op); };
    if (release != nullptr) work.release = [release, user] { release(user); };
    stream->enqueue(std::move(work));
    return CUDA_SUCCESS;
  } catch (const std::exception&) {
    return give_back(CUDA_ERROR_OPERATING_SYSTEM);
  }
}

int fastsync_fake_stopping(const fastsync_fake_op* op) { return op->stopping() ? 1 : 0; }

CUresult fastsync_fake_translate(fastsync_fake_op* op, CUdeviceptr address, size_t nbytes, int writes, void** host) {
  std::byte* found = op->translate(address, nbytes, writes != 0);
  if (found == nullptr) return CUDA_ERROR_ILLEGAL_ADDRESS;
  if (writes != 0) op->written.push_back({found, nbytes});
  *host = found;
  return CUDA_SUCCESS;
}

CUresult fastsync_fake_check(CUdeviceptr address, size_t nbytes, int device) {
  return driver().memory.translate(address, nbytes, device, false).host != nullptr ? CUDA_SUCCESS
                                                                                   : CUDA_ERROR_INVALID_VALUE;
}

int fastsync_fake_current_device(void) {
  const auto context = current_context();
  return context == nullptr ? -1 : context->device();
}

int fastsync_fake_stream_device(CUstream handle) {
  const auto stream = stream_of(current_context(), handle);
  return stream == nullptr ? -1 : stream->context().device();
}

CUresult fastsync_fake_context_error(void) {
  const auto context = current_context();
  return context == nullptr ? CUDA_ERROR_INVALID_CONTEXT : context->state();
}

uint64_t fastsync_fake_count(const char* symbol) { return driver().journal.calls_of(symbol); }

int64_t fastsync_fake_live(const char* kind) { return driver().journal.live_of(kind); }

size_t fastsync_fake_violations(char* buffer, size_t n) {
  std::string text;
  const auto all = driver().journal.violations();
  for (const std::string& one : all) text += one + '\n';
  copy_text(text, buffer, n);
  return all.size();
}

void fastsync_fake_clear_violations(void) { driver().journal.clear_violations(); }

size_t fastsync_fake_journal(char* buffer, size_t n) { return copy_text(driver().journal.to_json(), buffer, n); }

void fastsync_fake_violation(const char* text) { driver().journal.violation(text); }

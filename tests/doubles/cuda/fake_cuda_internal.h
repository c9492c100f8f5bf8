// What libfastsync_fake_cuda.so exports beside the driver API: for the other doubles, and for tests.
//
// Plain C, found by dlsym() in the library that was opened by path (the core opens it RTLD_LOCAL, so RTLD_DEFAULT need
// not find it: dlopen(getenv("FASTSYNC_CUDA_PATH"), RTLD_NOW) again gives the same copy).
//
// Threads: all functions are thread-safe. Errors: CUresult, as the driver's.
#pragma once

#include <cuda.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// The marker by which a double is known: nonzero.
extern const int fastsync_fake_cuda;

// --- Work of another double on a stream -------------------------------------------------------------------------------

// The work that is running now. Lives as long as `run`.
typedef struct fastsync_fake_op fastsync_fake_op;

// `run` is called once, on the stream's thread, in order with everything else on that stream and after its random delay.
// It may block; then it must look at fastsync_fake_stopping() at least every 100 ms. What it returns, if not
// CUDA_SUCCESS, becomes the sticky error of the stream's context. It must not call cu*. `release` (may be null) is called
// exactly once with `user`, after `run` or instead of it (the context has failed, or the process exits): what somebody
// waits for must be settled there too. Also the null stream (0 or CU_STREAM_LEGACY, of the calling thread's context).
// Errors: CUDA_ERROR_INVALID_HANDLE for no stream of ours, a sticky error; `release` is called then too.
typedef CUresult (*fastsync_fake_run)(void* user, fastsync_fake_op* op);
typedef void (*fastsync_fake_release)(void* user);
CUresult fastsync_fake_enqueue(CUstream stream, const char* what, fastsync_fake_run run, void* user,
                               fastsync_fake_release release);

// Nonzero once the process is exiting or the stream's context has failed or was destroyed: `run` returns soon.
int fastsync_fake_stopping(const fastsync_fake_op* op);

// Host address of [address, address + nbytes), checked now: inside one live allocation that the op's device can reach
// (device memory, imported, mapped and with access; pinned or registered host memory). It stays valid until `run`
// returns, even if somebody frees it meanwhile (which is recorded as a violation). `writes` is nonzero if it will be
// written. A range that fails the check is recorded as a violation; return what this returns (CUDA_ERROR_ILLEGAL_ADDRESS).
CUresult fastsync_fake_translate(fastsync_fake_op* op, CUdeviceptr address, size_t nbytes, int writes, void** host);

// The same check at the call, for a library that refuses bad pointers there: CUDA_SUCCESS or CUDA_ERROR_INVALID_VALUE.
// `device` is an ordinal. Records nothing.
CUresult fastsync_fake_check(CUdeviceptr address, size_t nbytes, int device);

// Ordinal of the calling thread's current context, -1 without one.
int fastsync_fake_current_device(void);
// Ordinal of a stream's context, -1 for no stream of ours. The null stream is that of the current context.
int fastsync_fake_stream_device(CUstream stream);
// The sticky error of the current context: CUDA_SUCCESS if it is well, CUDA_ERROR_INVALID_CONTEXT without one.
CUresult fastsync_fake_context_error(void);

// --- The journal (tests/doubles/common/journal.h) ---------------------------------------------------------------------

// Calls of an exported name so far. Every call counts, also one that fails.
uint64_t fastsync_fake_count(const char* symbol);
// Things of a kind that exist now: device_memory, device_bytes, pinned, registration, stream, event, memory_import,
// event_import, vmm_handle, vmm_reservation, vmm_mapping, module, primary_context (references).
int64_t fastsync_fake_live(const char* kind);
// How many violations there were. Their texts, one a line, cut to n - 1 bytes, go to `buffer` (may be null).
size_t fastsync_fake_violations(char* buffer, size_t n);
void fastsync_fake_clear_violations(void);
// The journal as JSON, cut to n - 1 bytes; returns its whole length.
size_t fastsync_fake_journal(char* buffer, size_t n);
// Records a violation in this journal on behalf of another double.
void fastsync_fake_violation(const char* text);

#ifdef __cplusplus
}  // extern "C"
#endif

// What libfastsync_fake_nccl.so exports beside NCCL's names: its journal (tests/doubles/common/journal.h), for tests.
//
// Plain C, found by dlsym(). Threads: thread-safe.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define FASTSYNC_FAKE_NCCL_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

// The marker by which a double is known is `const int fastsync_fake_nccl`: nonzero.

// Calls of an exported name so far.
FASTSYNC_FAKE_NCCL_API uint64_t fastsync_fake_nccl_count(const char* symbol);
// Things of a kind that exist now: communicator, rendezvous (servers of unique ids), operation (launched and not done),
// registration, memory (from ncclMemAlloc).
FASTSYNC_FAKE_NCCL_API int64_t fastsync_fake_nccl_live(const char* kind);
// How many violations there were ("mismatch", "use-after-destroy"). Their texts, one a line, cut to n - 1 bytes, go to
// `buffer` (may be null).
FASTSYNC_FAKE_NCCL_API size_t fastsync_fake_nccl_violations(char* buffer, size_t n);
FASTSYNC_FAKE_NCCL_API void fastsync_fake_nccl_clear_violations(void);
// The journal as JSON, cut to n - 1 bytes; returns its whole length.
FASTSYNC_FAKE_NCCL_API size_t fastsync_fake_nccl_journal(char* buffer, size_t n);

#ifdef __cplusplus
}  // extern "C"
#endif

// What ThreadSanitizer reports and is not so.
//
// A library that was opened at run time (the doubles) has its thread-local variables in memory from malloc(). When a
// thread is made on the stack of one that has ended, glibc frees the old one's, behind a lock of its own that
// ThreadSanitizer does not see: it reports the free against the ended thread's last access (glibc 2.36, GCC 12).
#if defined(__SANITIZE_THREAD__)

extern "C" __attribute__((visibility("default"))) const char* __tsan_default_suppressions();  // NOLINT
const char* __tsan_default_suppressions() { return "race:_dl_deallocate_tls\n"; }             // NOLINT

#endif

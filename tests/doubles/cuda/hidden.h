// Functions that an older driver does not have: dlsym() finds them only if FASTSYNC_FAKE_DRIVER is new enough.
//
// Each is exported as an indirect function, which the loader resolves when it is looked up; for a driver that is too old
// the resolver gives null, and so does dlsym(). Only what CUDA 12.0 added or later is done so: an older driver is refused
// by its version.
#pragma once

#include <cuda.h>

CUresult fake_cuLibraryLoadData(CUlibrary*, const void*, CUjit_option*, void**, unsigned int, CUlibraryOption*, void**,
                                unsigned int);
CUresult fake_cuLibraryUnload(CUlibrary);
CUresult fake_cuLibraryGetKernel(CUkernel*, CUlibrary, const char*);
CUresult fake_cuKernelGetFunction(CUfunction*, CUkernel);
CUresult fake_cuFuncLoad(CUfunction);
CUresult fake_cuGetProcAddress_v2(const char*, void**, int, cuuint64_t, CUdriverProcAddressQueryResult*);

// X(symbol, first driver version)
#define FASTSYNC_FAKE_HIDDEN(X) \
  X(cuLibraryLoadData, 12000)   \
  X(cuLibraryUnload, 12000)     \
  X(cuLibraryGetKernel, 12000)  \
  X(cuKernelGetFunction, 12000) \
  X(cuGetProcAddress_v2, 12000) \
  X(cuFuncLoad, 12040)

#include "common/dynamic_library.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <utility>
#include <vector>

namespace fastsync {
namespace {

using Mode = DynamicLibrary::Mode;

// A part of the C library that no program loads by itself.
constexpr const char* kSomeLibrary = "libBrokenLocale.so.1";

TEST(DynamicLibrary, FindsFunctionsAndSaysWhereTheyCameFrom) {
  std::string reason;
  const DynamicLibrary library = DynamicLibrary::open("libm.so.6", Mode::kLoad, reason);
  ASSERT_TRUE(library) << reason;
  EXPECT_EQ(library.path().front(), '/');
  EXPECT_NE(library.path().find("libm.so.6"), std::string::npos);
  auto* const cosine = library.symbol<double(double)>("cos");
  ASSERT_NE(cosine, nullptr);
  EXPECT_EQ(cosine(0.0), 1.0);
}

TEST(DynamicLibrary, WhatIsMissingIsListedOnlyWhereItIsRequired) {
  std::string reason;
  const DynamicLibrary library = DynamicLibrary::open("libm.so.6", Mode::kLoad, reason);
  ASSERT_TRUE(library) << reason;
  EXPECT_EQ(library.symbol<void()>("fastsync_no_such_function"), nullptr);
  std::vector<std::string> missing;
  EXPECT_NE(library.symbol<double(double)>("sin", missing), nullptr);
  EXPECT_EQ(library.symbol<void()>("fastsync_no_such_function", missing), nullptr);
  EXPECT_EQ(missing, std::vector<std::string>{"fastsync_no_such_function"});
}

TEST(DynamicLibrary, LooksOnlyIntoItself) {
  // dlsym() of a null handle would search the whole process.
  const DynamicLibrary nothing;
  EXPECT_FALSE(nothing);
  EXPECT_EQ(nothing.symbol<int(const char*)>("puts"), nullptr);
}

TEST(DynamicLibrary, AbsenceIsAReasonThatNamesTheFile) {
  std::string reason;
  EXPECT_FALSE(DynamicLibrary::open("/no/such/libvendor.so.1", Mode::kLoad, reason));
  EXPECT_NE(reason.find("/no/such/libvendor.so.1"), std::string::npos) << reason;
  // Nothing is left behind for the next caller of dlerror().
  EXPECT_EQ(::dlerror(), nullptr);
  EXPECT_FALSE(DynamicLibrary::open("", Mode::kLoad, reason));
  EXPECT_EQ(reason, "no file was named");
}

TEST(DynamicLibrary, FileThatIsNoLibraryIsAReason) {
  std::string reason;
  EXPECT_FALSE(DynamicLibrary::open("/proc/self/cmdline", Mode::kLoad, reason));
  EXPECT_NE(reason.find("/proc/self/cmdline"), std::string::npos) << reason;
}

TEST(DynamicLibrary, LoadedOnlyDoesNotLoad) {
  std::string reason;
  EXPECT_FALSE(DynamicLibrary::open(kSomeLibrary, Mode::kLoadedOnly, reason));
  EXPECT_NE(reason.find("not loaded"), std::string::npos) << reason;
  EXPECT_EQ(::dlerror(), nullptr);
  {
    const DynamicLibrary first = DynamicLibrary::open(kSomeLibrary, Mode::kLoad, reason);
    if (!first) GTEST_SKIP() << reason;
    EXPECT_TRUE(DynamicLibrary::open(kSomeLibrary, Mode::kLoadedOnly, reason)) << reason;
  }
  // Closed by its owners.
  EXPECT_FALSE(DynamicLibrary::open(kSomeLibrary, Mode::kLoadedOnly, reason));
}

TEST(DynamicLibrary, MovesWithItsLibrary) {
  std::string reason;
  DynamicLibrary first = DynamicLibrary::open(kSomeLibrary, Mode::kLoad, reason);
  if (!first) GTEST_SKIP() << reason;
  DynamicLibrary second = std::move(first);
  EXPECT_TRUE(DynamicLibrary::open(kSomeLibrary, Mode::kLoadedOnly, reason)) << reason;
  second = DynamicLibrary();
  EXPECT_FALSE(DynamicLibrary::open(kSomeLibrary, Mode::kLoadedOnly, reason));
}

}  // namespace
}  // namespace fastsync

#include "comm/nccl/nccl_library.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/error.h"
#include "support/expect_words.h"
#include "support/process.h"

namespace fastsync {
namespace {

using testing::expect_words;
using Mode = DynamicLibrary::Mode;

// A library is chosen once a process; every choice is made in one of its own.
template <typename Body>
void in_process(const char* named, Body body) {
  testing::Process process([&] {
    if (named != nullptr) {
      ::setenv("FASTSYNC_NCCL_PATH", named, 1);
    } else {
      ::unsetenv("FASTSYNC_NCCL_PATH");
    }
    ::setenv("FASTSYNC_ALLOW_FAKE", "1", 1);
    body();
    if (::testing::Test::HasFailure()) throw std::runtime_error("an expectation failed there");
  });
  EXPECT_EQ(process.join(), 0);
}

TEST(NcclLibrary, VersionsReadAsPeopleWriteThem) {
  EXPECT_EQ(NcclLibrary::version_text(22809), "2.28.9");
  EXPECT_EQ(NcclLibrary::version_text(21805), "2.18.5");
  EXPECT_EQ(NcclLibrary::version_text(23203), "2.32.3");
}

TEST(NcclLibrary, RefusesALibraryThatIsNotNccl) {
  std::string reason;
  EXPECT_EQ(NcclLibrary::open("libm.so.6", Mode::kLoad, reason), nullptr);
  expect_words(reason, {"libm.so.6", "lacks", "ncclGetVersion", "not NCCL"});
}

TEST(NcclLibrary, ReasonNamesEveryFileThatWasTriedAndHowToGetOne) {
  in_process(nullptr, [] {
    // By name there may be one here: then the candidates decide nothing, and there is no reason to look at.
    std::string reason;
    if (NcclLibrary::open("libnccl.so.2", Mode::kLoad, reason) != nullptr) return;
    const auto why = NcclLibrary::unavailable_reason({"/no/such/one/libnccl.so.2", "/no/such/two/libnccl.so.2"});
    ASSERT_TRUE(why.has_value());
    expect_words(*why, {"not loaded", "/no/such/one", "/no/such/two", "nccl-cu12", "nccl-cu13", "FASTSYNC_NCCL_PATH"});
    EXPECT_EQ(NcclLibrary::loaded(), nullptr);
    try {
      (void)NcclLibrary::get();
      ADD_FAILURE();
    } catch (const CommError& error) {
      expect_words(error.what(), {"no NCCL"});
    }
  });
}

TEST(NcclLibrary, NamedFileIsTheOnlyOneThatIsTried) {
  in_process("/no/such/libnccl.so.2", [] {
    const auto why = NcclLibrary::unavailable_reason({"/no/such/candidate/libnccl.so.2"});
    ASSERT_TRUE(why.has_value());
    expect_words(*why, {"/no/such/libnccl.so.2"});
    EXPECT_EQ(why->find("candidate"), std::string::npos) << *why;
  });
}

std::string double_path() {
#if defined(FASTSYNC_FAKE_NCCL_PATH)
  return FASTSYNC_FAKE_NCCL_PATH;
#else
  return {};
#endif
}

// Over a library: the double, or the vendor's own (which opens without a device), by FASTSYNC_REAL_NCCL.
class NcclLibraryFileTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (GetParam() == std::string("double")) {
      file_ = double_path();
      if (file_.empty()) GTEST_SKIP() << "no double of NCCL was built";
    } else {
      const char* vendors = std::getenv("FASTSYNC_REAL_NCCL");
      if (vendors == nullptr) GTEST_SKIP() << "FASTSYNC_REAL_NCCL does not name a libnccl.so.2";
      file_ = vendors;
    }
  }
  std::string file_;
};

TEST_P(NcclLibraryFileTest, OpensAndSaysWhatItIs) {
  in_process(file_.c_str(), [&] {
    EXPECT_EQ(NcclLibrary::unavailable_reason(), std::nullopt);
    const NcclLibrary& library = NcclLibrary::get();
    EXPECT_EQ(NcclLibrary::loaded(), &library);
    EXPECT_EQ(library.path(), file_);
    EXPECT_GE(library.version(), NcclLibrary::kMinVersion);
    EXPECT_EQ(library.version_text(), NcclLibrary::version_text(library.version()));
    EXPECT_EQ(library.is_fake(), GetParam() == std::string("double"));
    EXPECT_EQ(library.features().shrink, library.api().ncclCommShrink != nullptr);
    EXPECT_EQ(library.features().memory, library.api().ncclMemAlloc != nullptr);
  });
}

TEST_P(NcclLibraryFileTest, CandidateIsOpenedWhereNoneIsNamed) {
  in_process(nullptr, [&] {
    EXPECT_EQ(NcclLibrary::unavailable_reason({"/no/such/libnccl.so.2", file_}), std::nullopt);
    EXPECT_EQ(NcclLibrary::get().path(), file_);
  });
}

TEST_P(NcclLibraryFileTest, FailureIsAskedAgainAndSuccessIsKept) {
  in_process(nullptr, [&] {
    std::string reason;
    if (NcclLibrary::open("libnccl.so.2", Mode::kLoad, reason) != nullptr) return;
    EXPECT_NE(NcclLibrary::unavailable_reason(), std::nullopt);
    EXPECT_EQ(NcclLibrary::unavailable_reason({file_}), std::nullopt);
    EXPECT_EQ(NcclLibrary::unavailable_reason({"/no/such/libnccl.so.2"}), std::nullopt);
  });
}

TEST_P(NcclLibraryFileTest, IdsDiffer) {
  in_process(file_.c_str(), [] {
    const nccl::UniqueId first = NcclLibrary::get().unique_id();
    const nccl::UniqueId second = NcclLibrary::get().unique_id();
    EXPECT_NE(std::string(first.internal, 128), std::string(second.internal, 128));
  });
}

TEST_P(NcclLibraryFileTest, ErrorsSayWhatFailedInWhichVersion) {
  in_process(file_.c_str(), [] {
    const NcclLibrary& library = NcclLibrary::get();
    EXPECT_NO_THROW(library.check(nccl::kSuccess, "ncclBroadcast"));
    EXPECT_NO_THROW(library.check(nccl::kInProgress, "ncclBroadcast"));
    try {
      library.check(nccl::kInvalidUsage, "ncclCommInitRankConfig");
      ADD_FAILURE();
    } catch (const CommError& error) {
      expect_words(error.what(), {"ncclCommInitRankConfig failed", "ncclInvalidUsage (5)", "a device of its own",
                                  library.version_text().c_str()});
    }
    // A real call with a bad argument: the number of ranks.
    nccl::Comm comm = nullptr;
    nccl::Config config;
    nccl::set_config_version(config, library.version());
    const nccl::Result result = library.api().ncclCommInitRankConfig(&comm, 0, library.unique_id(), 0, &config);
    EXPECT_NE(result, nccl::kSuccess);
    EXPECT_THROW(library.check(result, "ncclCommInitRankConfig"), CommError);
  });
}

TEST(NcclLibrary, RefusesADoubleThatNobodyAllowed) {
  if (double_path().empty()) GTEST_SKIP() << "no double of NCCL was built";
  in_process(double_path().c_str(), [] {
    ::unsetenv("FASTSYNC_ALLOW_FAKE");
    const auto why = NcclLibrary::unavailable_reason();
    ASSERT_TRUE(why.has_value());
    expect_words(*why, {"test double", "FASTSYNC_ALLOW_FAKE"});
  });
}

TEST(NcclLibrary, RefusesAnOldVersionByItsNumber) {
  if (double_path().empty()) GTEST_SKIP() << "no double of NCCL was built";
  in_process(double_path().c_str(), [] {
    ::setenv("FASTSYNC_FAKE_NCCL_VERSION", "21703", 1);
    const auto why = NcclLibrary::unavailable_reason();
    ASSERT_TRUE(why.has_value());
    expect_words(*why, {"NCCL 2.17.3", "2.18.0", "nvidia-nccl"});
  });
}

INSTANTIATE_TEST_SUITE_P(, NcclLibraryFileTest, ::testing::Values("double", "vendor"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace fastsync

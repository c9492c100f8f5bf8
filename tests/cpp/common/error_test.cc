#include "common/error.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <thread>

#include "common/thread_name.h"

namespace fastsync {
namespace {

TEST(Error, CarriesKindRankAndText) {
  try {
    throw PeerLostError("rank 3 is gone", 3);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kPeerLost);
    EXPECT_EQ(error.rank(), 3);
    EXPECT_STREQ(error.what(), "rank 3 is gone");
  }
  EXPECT_EQ(InvalidArgument("x").rank(), -1);
}

TEST(Error, KeepsTheTextBehindANullCharacter) {
  const std::string text("tensor 'a\0b' is bad", 19);
  const Error copy(InvalidArgument(text, 1));
  EXPECT_EQ(copy.message(), text);
}

TEST(Concat, JoinsTextAndNumbers) {
  EXPECT_EQ(concat("tensor '", std::string("w"), "' has ", 12, " bytes"), "tensor 'w' has 12 bytes");
}

TEST(ErrnoText, SaysWordsAndNumber) {
  EXPECT_EQ(errno_text(ENOENT), "No such file or directory (errno 2)");
  EXPECT_NE(errno_text(987654).find("(errno 987654)"), std::string::npos);
}

#if defined(__linux__)
TEST(ThreadName, IsSetAndCutToWhatTheSystemKeeps) {
  std::thread([] {
    char name[16] = "";
    set_thread_name("fastsync");
    ASSERT_EQ(::pthread_getname_np(::pthread_self(), name, sizeof(name)), 0);
    EXPECT_STREQ(name, "fastsync");
    set_thread_name("a name of more than fifteen bytes");
    ASSERT_EQ(::pthread_getname_np(::pthread_self(), name, sizeof(name)), 0);
    EXPECT_STREQ(name, "a name of more ");
  }).join();
}
#endif

}  // namespace
}  // namespace fastsync

// Messages are read by people: tests look for the words that matter.
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>

namespace fastsync::testing {

inline void expect_words(const std::string& text, std::initializer_list<const char*> words) {
  for (const char* word : words) {
    EXPECT_NE(text.find(word), std::string::npos) << "'" << word << "' is not in: " << text;
  }
}

}  // namespace fastsync::testing

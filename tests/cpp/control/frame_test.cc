// Frames are the one thing that any process may send us: what comes back from bytes is right, or CommError.
#include "control/frame.h"

#include <gtest/gtest.h>

#include <functional>
#include <random>

namespace fastsync {
namespace {

using Bytes = std::vector<std::byte>;

Hello a_hello() {
  Hello hello;
  hello.rank = 3;
  hello.world = 5;
  hello.source = 2;
  hello.pid = 0x1122334455667788ULL;
  hello.library_version = "1.2.3";
  hello.token = "0123456789abcdef";
  hello.host = "h\xC3\xB6st";
  return hello;
}

Join a_join() {
  Join join;
  join.call = 7;
  join.last_sync = 6;
  join.comm_generation = 2;
  join.transport = "auto";
  join.manifests = {1, ~std::uint64_t{0}, 0};
  return join;
}

Begin a_begin() {
  Begin begin;
  begin.version = (std::uint64_t{1} << 63) - 1;
  begin.fingerprint = 99;
  begin.tensors = 18867;
  begin.nbytes = std::uint64_t{1} << 40;
  begin.bucket_bytes = 512;
  begin.asked_bytes = 300;
  begin.comm_generation = 4;
  begin.set_id = ~std::uint64_t{0};
  begin.share_bytes = 768;
  begin.buffers = 2;
  begin.verify = 1;
  begin.strict = 1;
  begin.streaming = 1;
  begin.manifest_follows = 1;
  begin.transport = "shm";
  return begin;
}

Failure a_failure() {
  Failure failure;
  failure.kind = ErrorKind::kManifestMismatch;
  failure.rank = 3;
  failure.reporter = -1;
  failure.answers = 12;
  failure.message = "tensor 'w' is float32[3], here it is float32[4]";
  return failure;
}

BucketHeader a_bucket() {
  BucketHeader header;
  header.index = 1;
  header.used_bytes = 2;
  header.tensors_end = 3;
  header.checksum = {4, 5};
  header.flags = 6;
  return header;
}

// --- round trips ----------------------------------------------------------------------------------------------------

TEST(FrameHeader, ComesBackForEveryType) {
  for (std::uint16_t type = 1; type <= 18; ++type) {
    FrameHeader header;
    header.type = static_cast<FrameType>(type);
    header.flags = 0xFFFF;
    header.payload_bytes = kMaxPayloadBytes;
    header.descriptor_count = 4;
    header.sync = ~std::uint64_t{0};
    header.aux = 0x0102030405060708ULL;
    std::array<std::byte, kFrameHeaderBytes> bytes{};
    encode_frame_header(header, bytes.data());
    const FrameHeader back = decode_frame_header(bytes.data());
    EXPECT_EQ(back.type, header.type);
    EXPECT_EQ(back.flags, header.flags);
    EXPECT_EQ(back.payload_bytes, header.payload_bytes);
    EXPECT_EQ(back.descriptor_count, header.descriptor_count);
    EXPECT_EQ(back.sync, header.sync);
    EXPECT_EQ(back.aux, header.aux);
  }
}

TEST(FrameHeader, RefusesWhatIsNotOurs) {
  FrameHeader good;
  good.type = FrameType::kJoin;
  std::array<std::byte, kFrameHeaderBytes> bytes{};
  const auto refused = [&](const FrameHeader& header, std::size_t at, std::uint8_t value) {
    encode_frame_header(header, bytes.data());
    bytes[at] = std::byte{value};
    EXPECT_THROW((void)decode_frame_header(bytes.data()), CommError) << "byte " << at << " = " << int{value};
  };
  for (std::size_t i = 0; i < 4; ++i) refused(good, i, 0);  // the magic number
  refused(good, 4, 0);                                      // type 0
  refused(good, 4, 20);
  refused(good, 5, 1);
  refused(good, 10, 0x81);  // a payload of 8 MiB + 64 KiB
  refused(good, 11, 0xFF);
  refused(good, 12, 5);  // descriptors
}

TEST(HelloFrame, ComesBack) {
  const Hello hello = a_hello();
  Hello back;
  decode(encode(hello), back);
  EXPECT_EQ(back.protocol, kProtocolVersion);
  EXPECT_EQ(back.rank, hello.rank);
  EXPECT_EQ(back.world, hello.world);
  EXPECT_EQ(back.source, hello.source);
  EXPECT_EQ(back.pid, hello.pid);
  EXPECT_EQ(back.library_version, hello.library_version);
  EXPECT_EQ(back.token, hello.token);
  EXPECT_EQ(back.host, hello.host);
}

TEST(HelloFrame, OfAnotherProtocolIsReadAsFarAsItsNumber) {
  PayloadWriter writer;
  writer.u32(kProtocolVersion + 41);
  writer.text("everything behind may differ");
  Hello back;
  decode(writer.take(), back);
  EXPECT_EQ(back.protocol, kProtocolVersion + 41);
}

TEST(JoinFrame, ComesBack) {
  const Join join = a_join();
  Join back;
  back.manifests = {5};  // must not survive
  decode(encode(join), back);
  EXPECT_EQ(back.call, join.call);
  EXPECT_EQ(back.last_sync, join.last_sync);
  EXPECT_EQ(back.comm_generation, join.comm_generation);
  EXPECT_EQ(back.transport, join.transport);
  EXPECT_EQ(back.manifests, join.manifests);
}

TEST(JoinFrame, RefusesMoreManifestsThanAnyoneHolds) {
  Join join = a_join();
  join.manifests.assign(65, 1);
  Join back;
  EXPECT_THROW(decode(encode(join), back), CommError);
}

TEST(BeginFrame, ComesBack) {
  const Begin begin = a_begin();
  Begin back;
  decode(encode(begin), back);
  EXPECT_EQ(back.version, begin.version);
  EXPECT_EQ(back.fingerprint, begin.fingerprint);
  EXPECT_EQ(back.tensors, begin.tensors);
  EXPECT_EQ(back.nbytes, begin.nbytes);
  EXPECT_EQ(back.bucket_bytes, begin.bucket_bytes);
  EXPECT_EQ(back.asked_bytes, begin.asked_bytes);
  EXPECT_EQ(back.comm_generation, begin.comm_generation);
  EXPECT_EQ(back.set_id, begin.set_id);
  EXPECT_EQ(back.share_bytes, begin.share_bytes);
  EXPECT_EQ(back.buffers, begin.buffers);
  EXPECT_EQ(back.verify, begin.verify);
  EXPECT_EQ(back.strict, begin.strict);
  EXPECT_EQ(back.streaming, begin.streaming);
  EXPECT_EQ(back.manifest_follows, begin.manifest_follows);
  EXPECT_EQ(back.transport, begin.transport);
}

TEST(BeginFrame, RefusesBucketSizesThatNoPlanHas) {
  for (const std::uint64_t size : {std::uint64_t{1}, std::uint64_t{257}, ~std::uint64_t{0}, std::uint64_t{1} << 63}) {
    Begin begin = a_begin();
    begin.bucket_bytes = size;
    Begin back;
    EXPECT_THROW(decode(encode(begin), back), CommError) << size;
  }
}

TEST(FailureFrame, ComesBack) {
  const Failure failure = a_failure();
  Failure back;
  decode(encode(failure), back);
  EXPECT_EQ(back.kind, failure.kind);
  EXPECT_EQ(back.rank, failure.rank);
  EXPECT_EQ(back.reporter, failure.reporter);
  EXPECT_EQ(back.answers, failure.answers);
  EXPECT_EQ(back.message, failure.message);
}

TEST(FailureFrame, OfAKindWeDoNotKnowIsAPeerThatFailed) {
  Bytes bytes = encode(a_failure());
  bytes[0] = std::byte{200};
  Failure back;
  decode(bytes, back);
  EXPECT_EQ(back.kind, ErrorKind::kPeerFailed);
  EXPECT_EQ(back.message, a_failure().message);
}

TEST(FailureFrame, CutsAMessageThatIsTooLong) {
  Failure failure = a_failure();
  failure.message.assign(100'000, 'x');
  Failure back;
  decode(encode(failure), back);
  EXPECT_EQ(back.message.size(), kMaxMessageBytes);
  EXPECT_TRUE(back.message.ends_with("x..."));
}

TEST(BucketFrame, ComesBack) {
  const BucketHeader header = a_bucket();
  BucketHeader back;
  decode(encode(header), back);
  EXPECT_EQ(back.index, header.index);
  EXPECT_EQ(back.used_bytes, header.used_bytes);
  EXPECT_EQ(back.tensors_end, header.tensors_end);
  EXPECT_EQ(back.checksum, header.checksum);
  EXPECT_EQ(back.flags, header.flags);
}

// --- lists ----------------------------------------------------------------------------------------------------------

ReadyLists through_the_wire(const ReadyLists& lists) {
  ReadyLists back;
  for (const Bytes& piece : encode_lists(lists)) {
    EXPECT_LE(piece.size(), kMaxPayloadBytes);
    decode_lists(piece, back);
  }
  return back;
}

TEST(ReadyListsFrames, OfNothingAreOneEmptyPiece) {
  const auto pieces = encode_lists({});
  ASSERT_EQ(pieces.size(), 1U);
  EXPECT_TRUE(pieces[0].empty());
}

TEST(ReadyListsFrames, KeepEveryNameAndItsList) {
  const ReadyLists lists{{"", "a", "b.c"}, {"a", std::string("nul\0inside", 10)}};
  const ReadyLists back = through_the_wire(lists);
  EXPECT_EQ(back.missing, lists.missing);
  EXPECT_EQ(back.unexpected, lists.unexpected);
}

TEST(ReadyListsFrames, TravelInPiecesWhenTheyAreLong) {
  ReadyLists lists;
  for (int i = 0; i < 100; ++i) lists.missing.push_back(std::string(kMaxNameBytes - 3, 'n') + std::to_string(100 + i));
  for (int i = 0; i < 100'000; ++i) lists.unexpected.push_back(std::to_string(i));
  EXPECT_GT(encode_lists(lists).size(), 6U);
  const ReadyLists back = through_the_wire(lists);
  EXPECT_EQ(back.missing, lists.missing);
  EXPECT_EQ(back.unexpected, lists.unexpected);
}

TEST(ReadyListsFrames, RefuseANameThatNoManifestHolds) {
  const std::string longer(kMaxNameBytes + 1, 'n');
  EXPECT_THROW((void)encode_lists({{"fits", longer}, {}}), InvalidArgument);
  EXPECT_THROW((void)encode_lists({{}, {std::string(kMaxPayloadBytes + 1, 'n')}}), InvalidArgument);
  PayloadWriter writer;
  writer.u8(0);
  writer.text(longer);
  ReadyLists back;
  EXPECT_THROW(decode_lists(writer.take(), back), CommError);
}

TEST(ReadyListsFrames, RefuseAListThatDoesNotExist) {
  PayloadWriter writer;
  writer.u8(2);
  writer.text("name");
  ReadyLists back;
  EXPECT_THROW(decode_lists(writer.take(), back), CommError);
}

// --- messages -------------------------------------------------------------------------------------------------------

TEST(CutMessage, LeavesWhatFits) {
  const std::string fits(kMaxMessageBytes, 'x');
  EXPECT_EQ(cut_message(fits), fits);
  EXPECT_EQ(cut_message(""), "");
}

TEST(CutMessage, NeverHalvesACharacter) {
  const std::vector<std::string> characters{"x", "\xC3\xA4", "\xE2\x82\xAC", "\xF0\x9F\x8C\x8D"};
  for (const std::string& character : characters) {
    for (std::size_t lead = 0; lead < 8; ++lead) {
      std::string message(lead, 'a');
      while (message.size() <= 2 * kMaxMessageBytes) message += character;
      const std::string cut = cut_message(message);
      EXPECT_LE(cut.size(), kMaxMessageBytes);
      EXPECT_GT(cut.size(), kMaxMessageBytes - 4 - character.size());
      EXPECT_TRUE(is_valid_utf8(cut)) << "characters of " << character.size() << " bytes behind " << lead;
      ASSERT_TRUE(cut.ends_with("..."));
      EXPECT_TRUE(message.starts_with(cut.substr(0, cut.size() - 3)));
    }
  }
}

TEST(CutMessage, EndsForBytesThatAreNoText) { EXPECT_EQ(cut_message(std::string(10'000, '\x80')), "..."); }

// --- anything at all ------------------------------------------------------------------------------------------------

// A decoder either takes the bytes or throws CommError, and what it keeps is bounded by what it was given.
struct Decoder {
  const char* name;
  Bytes good;
  std::function<std::size_t(const Bytes&)> decode;  // returns how many bytes of text it kept
};

std::vector<Decoder> decoders() {
  return {
      {"Hello", encode(a_hello()),
       [](const Bytes& bytes) {
         Hello out;
         decode(bytes, out);
         return out.library_version.size() + out.token.size() + out.host.size();
       }},
      {"Join", encode(a_join()),
       [](const Bytes& bytes) {
         Join out;
         decode(bytes, out);
         return out.transport.size() + 8 * out.manifests.size();
       }},
      {"Begin", encode(a_begin()),
       [](const Bytes& bytes) {
         Begin out;
         decode(bytes, out);
         return out.transport.size();
       }},
      {"Failure", encode(a_failure()),
       [](const Bytes& bytes) {
         Failure out;
         decode(bytes, out);
         EXPECT_LT(static_cast<std::uint16_t>(out.kind), kErrorKindCount);
         return out.message.size();
       }},
      {"BucketHeader", encode(a_bucket()),
       [](const Bytes& bytes) {
         BucketHeader out;
         decode(bytes, out);
         return std::size_t{0};
       }},
      {"ReadyLists", encode_lists({{"a", "bb"}, {"ccc", ""}})[0],
       [](const Bytes& bytes) {
         ReadyLists out;
         decode_lists(bytes, out);
         std::size_t kept = 0;
         for (const auto* list : {&out.missing, &out.unexpected}) {
           for (const std::string& name : *list) kept += name.size() + 5;
         }
         return kept;
       }},
  };
}

// True if the decoder took them.
bool feed(const Decoder& decoder, const Bytes& bytes) {
  try {
    EXPECT_LE(decoder.decode(bytes), bytes.size()) << decoder.name;
    return true;
  } catch (const CommError&) {
    return false;
  }
}

TEST(Payloads, RefuseToBeCutShortAnywhere) {
  for (const Decoder& decoder : decoders()) {
    ASSERT_TRUE(feed(decoder, decoder.good)) << decoder.name;
    for (std::size_t n = 0; n < decoder.good.size(); ++n) {
      const Bytes cut(decoder.good.begin(), decoder.good.begin() + static_cast<std::ptrdiff_t>(n));
      // A list may end behind any name: it travels in pieces.
      const bool whole_names =
          std::string_view(decoder.name) == "ReadyLists" && (n == 0 || n == 6 || n == 13 || n == 21);
      EXPECT_EQ(feed(decoder, cut), whole_names) << decoder.name << " cut to " << n << " bytes";
    }
  }
}

TEST(Payloads, RefuseBytesThatAreLeftOver) {
  for (const Decoder& decoder : decoders()) {
    Bytes longer = decoder.good;
    longer.push_back(std::byte{0});
    EXPECT_FALSE(feed(decoder, longer)) << decoder.name;
  }
}

TEST(Payloads, SurviveMutation) {
  std::mt19937_64 random(20240611);
  for (const Decoder& decoder : decoders()) {
    for (int round = 0; round < 20'000; ++round) {
      Bytes bytes = decoder.good;
      const std::size_t changes = 1 + random() % 4;
      for (std::size_t i = 0; i < changes; ++i) bytes[random() % bytes.size()] = static_cast<std::byte>(random());
      if (random() % 4 == 0) bytes.resize(random() % (2 * bytes.size()));
      (void)feed(decoder, bytes);
    }
  }
}

TEST(Payloads, SurviveRandomBytes) {
  std::mt19937_64 random(42);
  for (const Decoder& decoder : decoders()) {
    for (int round = 0; round < 20'000; ++round) {
      Bytes bytes(random() % 200);
      for (std::byte& b : bytes) b = static_cast<std::byte>(random() % 3 == 0 ? 0 : random());
      (void)feed(decoder, bytes);
    }
  }
}

TEST(FrameHeader, SurvivesRandomBytes) {
  std::mt19937_64 random(7);
  std::array<std::byte, kFrameHeaderBytes> bytes{};
  int taken = 0;
  for (int round = 0; round < 200'000; ++round) {
    for (std::byte& b : bytes) b = static_cast<std::byte>(random());
    if (round % 2 == 0) std::memcpy(bytes.data(), &kFrameMagic, sizeof(kFrameMagic));
    if (round % 4 == 0) std::memset(bytes.data() + 5, 0, 11);
    try {
      const FrameHeader header = decode_frame_header(bytes.data());
      EXPECT_LE(header.payload_bytes, kMaxPayloadBytes);
      EXPECT_LE(header.descriptor_count, 4U);
      EXPECT_GE(static_cast<int>(header.type), 1);
      EXPECT_LE(static_cast<int>(header.type), static_cast<int>(FrameType::kSums));
      ++taken;
    } catch (const CommError&) {
    }
  }
  EXPECT_GT(taken, 0);
}

}  // namespace
}  // namespace fastsync

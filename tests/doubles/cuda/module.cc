#include "doubles/cuda/module.h"

#include <elf.h>

#include <cctype>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "doubles/cuda/settings.h"

namespace fastsync::fake {
namespace {

constexpr std::uint32_t kFatbinMagic = 0xBA55ED50;
constexpr std::uint32_t kFatbinWrapperMagic = 0x466243B1;
constexpr int kComputeCapability = 90;

struct FatbinHeader {
  std::uint32_t magic;
  std::uint16_t version;
  std::uint16_t header_bytes;
  std::uint64_t payload_bytes;
};
struct FatbinWrapper {
  std::uint32_t magic;
  std::uint32_t version;
  const void* data;
  const void* unused;
};

// What follows blanks and comments.
std::string_view skip_comments(std::string_view text) {
  for (;;) {
    while (!text.empty() && std::isspace(static_cast<unsigned char>(text.front())) != 0) text.remove_prefix(1);
    std::size_t end = 0;
    if (text.starts_with("//")) {
      end = text.find('\n');
    } else if (text.starts_with("/*")) {
      end = text.find("*/", 2);
      if (end != std::string_view::npos) end += 2;
    } else {
      return text;
    }
    if (end == std::string_view::npos) return {};
    text.remove_prefix(end);
  }
}

// The number behind a directive ("8.4" as 84, "sm_75" as 75), if it is there.
std::optional<int> directive(std::string_view text, std::string_view name) {
  const std::size_t at = text.find(name);
  if (at == std::string_view::npos) return std::nullopt;
  const std::size_t digit = text.find_first_of("0123456789", at + name.size());
  if (digit == std::string_view::npos) return std::nullopt;
  char* end = nullptr;
  const long number = std::strtol(text.data() + digit, &end, 10);
  return static_cast<int>(*end == '.' ? number * 10 + std::strtol(end + 1, nullptr, 10) : number);
}

// CUDA 12.0 reads PTX 8.0, 12.4 reads 8.4, 13.0 reads 9.0.
int newest_ptx() {
  const int version = settings().driver_version;
  return (version / 1000 - 4) * 10 + version % 1000 / 10;
}

CUresult check_ptx(std::string_view text) {
  if (!text.starts_with(".version")) return CUDA_ERROR_INVALID_IMAGE;
  const auto version = directive(text, ".version");
  const auto target = directive(text, ".target");
  if (!version || !target || text.find(".address_size") == std::string_view::npos) return CUDA_ERROR_INVALID_PTX;
  if (*version > newest_ptx()) return CUDA_ERROR_UNSUPPORTED_PTX_VERSION;
  if (*target > kComputeCapability) return CUDA_ERROR_NO_BINARY_FOR_GPU;
  return CUDA_SUCCESS;
}

}  // namespace

std::shared_ptr<Module> Module::load(const void* image, CUresult& result) {
  result = CUDA_SUCCESS;
  std::uint32_t magic = 0;
  // One byte after the other: a short text may end where a page does.
  const auto* bytes = static_cast<const unsigned char*>(image);
  for (unsigned i = 0; i < 4 && (i == 0 || bytes[i - 1] != 0); ++i) magic |= std::uint32_t{bytes[i]} << (8 * i);
  if (magic == kFatbinWrapperMagic) return load(static_cast<const FatbinWrapper*>(image)->data, result);
  if (magic == kFatbinMagic) {
    FatbinHeader header{};
    std::memcpy(&header, image, sizeof header);
    return std::shared_ptr<Module>(new Module(
        Format::kBinary, std::string(static_cast<const char*>(image), header.header_bytes + header.payload_bytes)));
  }
  if (std::memcmp(&magic, ELFMAG, SELFMAG) == 0) {
    Elf64_Ehdr header{};
    std::memcpy(&header, image, sizeof header);
    if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_machine != EM_CUDA) {
      result = CUDA_ERROR_INVALID_IMAGE;
      return nullptr;
    }
    const std::uint64_t sections = header.e_shoff + std::uint64_t{header.e_shentsize} * header.e_shnum;
    const std::uint64_t segments = header.e_phoff + std::uint64_t{header.e_phentsize} * header.e_phnum;
    return std::shared_ptr<Module>(new Module(
        Format::kBinary, std::string(static_cast<const char*>(image), sections > segments ? sections : segments)));
  }
  const std::string_view text = skip_comments(static_cast<const char*>(image));
  result = check_ptx(text);
  if (result != CUDA_SUCCESS) return nullptr;
  return std::shared_ptr<Module>(new Module(Format::kPtx, std::string(text)));
}

bool Module::has_kernel(std::string_view name) const {
  if (name.empty()) return false;
  if (format_ == Format::kBinary) return code_.find(".text." + std::string(name) + '\0') != std::string::npos;
  constexpr std::string_view kEntry = ".entry";
  for (std::size_t at = code_.find(kEntry); at != std::string::npos; at = code_.find(kEntry, at + 1)) {
    const std::size_t begin = code_.find_first_not_of(" \t\n", at + kEntry.size());
    if (begin != std::string::npos && code_.compare(begin, name.size(), name) == 0 &&
        std::isalnum(static_cast<unsigned char>(code_[begin + name.size()])) == 0 &&
        code_[begin + name.size()] != '_') {
      return true;
    }
  }
  return false;
}

}  // namespace fastsync::fake

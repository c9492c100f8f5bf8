// Loaded code: what an image is allowed to be, and which kernels it has.
//
// Threads: immutable once made. Errors: load() answers as the driver does for garbage, for PTX that is too new and for a
// device that is too old.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

namespace fastsync::fake {

class Module {
 public:
  // PTX text, an ELF image or a fat binary. Null, with `result` set, if the driver would refuse it.
  [[nodiscard]] static std::shared_ptr<Module> load(const void* image, CUresult& result);
  [[nodiscard]] bool has_kernel(std::string_view name) const;

 private:
  enum class Format : std::uint8_t { kPtx, kBinary };
  Module(Format format, std::string code) noexcept : format_(format), code_(std::move(code)) {}
  const Format format_;
  const std::string code_;
};

// A kernel or a function of one: in the double the same thing under the same handle.
struct Function {
  std::weak_ptr<Module> module;
  std::string name;
};

}  // namespace fastsync::fake

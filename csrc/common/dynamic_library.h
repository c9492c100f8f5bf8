// A shared library that is opened at run time, for vendor interfaces that the core does not link to.
//
// Ownership: move-only; closes the library on destruction, after which its functions must not be called. A library that
// has threads or handlers of its own (CUDA, NCCL) is never closed: whoever opens it keeps the object for ever.
// Threads: a value; lookups may run concurrently.
// Errors: "it is not there" is an answer, not an exception: an empty library and a reason fit to be shown to a user.
#pragma once

#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace fastsync {

class DynamicLibrary {
 public:
  enum class Mode {
    kLoad,        // symbols are resolved now and kept private (RTLD_NOW | RTLD_LOCAL)
    kLoadedOnly,  // as above, but only what this process has loaded already (RTLD_NOLOAD)
  };

  DynamicLibrary() = default;
  // `file` is a path, or a bare name to be looked for as the loader does. Empty on failure, and `reason` says why.
  [[nodiscard]] static DynamicLibrary open(const std::string& file, Mode mode, std::string& reason);

  ~DynamicLibrary() { close(); }
  DynamicLibrary(DynamicLibrary&& other) noexcept
      : handle_(std::exchange(other.handle_, nullptr)), path_(std::move(other.path_)) {}
  DynamicLibrary& operator=(DynamicLibrary&& other) noexcept {
    if (this != &other) {
      close();
      handle_ = std::exchange(other.handle_, nullptr);
      path_ = std::move(other.path_);
    }
    return *this;
  }
  DynamicLibrary(const DynamicLibrary&) = delete;
  DynamicLibrary& operator=(const DynamicLibrary&) = delete;

  [[nodiscard]] explicit operator bool() const noexcept { return handle_ != nullptr; }
  // The file that the loader chose, or the name that was asked for where it does not say.
  [[nodiscard]] const std::string& path() const noexcept { return path_; }

  // T is a function type or the type of a variable. Null where there is no such symbol.
  template <typename T>
  [[nodiscard]] T* symbol(const char* name) const noexcept {
    return reinterpret_cast<T*>(address_of(name));
  }
  // The same for a symbol that must be there: its name is added to `missing` where it is not.
  template <typename T>
  [[nodiscard]] T* symbol(const char* name, std::vector<std::string>& missing) const {
    T* found = symbol<T>(name);
    if (found == nullptr) missing.emplace_back(name);
    return found;
  }

 private:
  [[nodiscard]] void* address_of(const char* name) const noexcept;
  void close() noexcept;

  void* handle_ = nullptr;
  std::string path_;
};

}  // namespace fastsync

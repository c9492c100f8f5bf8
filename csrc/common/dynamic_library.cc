#include "common/dynamic_library.h"

#include <dlfcn.h>
#include <link.h>

#include "common/error.h"

namespace fastsync {

DynamicLibrary DynamicLibrary::open(const std::string& file, Mode mode, std::string& reason) {
  DynamicLibrary library;
  if (file.empty()) {
    // dlopen("") is the program itself.
    reason = "no file was named";
    return library;
  }
  const int flags = RTLD_NOW | RTLD_LOCAL | (mode == Mode::kLoadedOnly ? RTLD_NOLOAD : 0);
  library.handle_ = ::dlopen(file.c_str(), flags);
  if (library.handle_ == nullptr) {
    // Always fetched, also where it is not used: the loader keeps it for the next caller of dlerror().
    const char* error = ::dlerror();
    if (mode == Mode::kLoadedOnly) {
      reason = concat(file, " is not loaded in this process");
    } else {
      reason = error != nullptr ? std::string(error) : concat("cannot open ", file);
    }
    return library;
  }
  library.path_ = file;
  link_map* map = nullptr;
  if (::dlinfo(library.handle_, RTLD_DI_LINKMAP, static_cast<void*>(&map)) == 0 && map != nullptr &&
      map->l_name != nullptr && *map->l_name != '\0') {
    library.path_ = map->l_name;
  }
  return library;
}

void* DynamicLibrary::address_of(const char* name) const noexcept {
  // A null handle would mean RTLD_DEFAULT: every library of the process.
  return handle_ == nullptr ? nullptr : ::dlsym(handle_, name);
}

void DynamicLibrary::close() noexcept {
  if (handle_ != nullptr) ::dlclose(std::exchange(handle_, nullptr));
}

}  // namespace fastsync

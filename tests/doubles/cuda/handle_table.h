// Opaque handles for objects: never reused and never a pointer, so that a stale or foreign handle is known for one.
//
// Threads: thread-safe. Ownership: shared; whoever found an object keeps it while it uses it. Errors: null for a handle
// that was never given out, or was taken back.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace fastsync::fake {

template <typename T>
class HandleTable {
 public:
  // `kind` tells the tables apart: a stream's handle is never an event's.
  explicit HandleTable(std::uintptr_t kind) : next_((kind << 32U) + 0x1000) {}

  [[nodiscard]] void* add(std::shared_ptr<T> object) {
    const std::lock_guard lock(mutex_);
    const std::uintptr_t handle = next_;
    next_ += 16;
    objects_.emplace(handle, std::move(object));
    return reinterpret_cast<void*>(handle);
  }
  [[nodiscard]] std::shared_ptr<T> find(const void* handle) const {
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(reinterpret_cast<std::uintptr_t>(handle));
    return found == objects_.end() ? nullptr : found->second;
  }
  std::shared_ptr<T> take(const void* handle) {
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(reinterpret_cast<std::uintptr_t>(handle));
    if (found == objects_.end()) return nullptr;
    std::shared_ptr<T> object = std::move(found->second);
    objects_.erase(found);
    return object;
  }
  [[nodiscard]] std::vector<std::shared_ptr<T>> all() const {
    const std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<T>> found;
    for (const auto& [handle, object] : objects_) found.push_back(object);
    return found;
  }
  std::vector<std::shared_ptr<T>> take_if(const std::function<bool(const T&)>& chosen) {
    const std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<T>> taken;
    for (auto it = objects_.begin(); it != objects_.end();) {
      if (chosen(*it->second)) {
        taken.push_back(std::move(it->second));
        it = objects_.erase(it);
      } else {
        ++it;
      }
    }
    return taken;
  }

 private:
  mutable std::mutex mutex_;
  std::uintptr_t next_;
  std::map<std::uintptr_t, std::shared_ptr<T>> objects_;
};

}  // namespace fastsync::fake

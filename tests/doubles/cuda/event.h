// An event: the mark of the last record. One for other processes keeps its marks in a page that they map.
//
// Threads: thread-safe. Errors: none of its own.
#pragma once

#include <functional>
#include <memory>
#include <mutex>

#include "doubles/cuda/shared_memory.h"
#include "doubles/cuda/stream.h"

namespace fastsync::fake {

class Event {
 public:
  Event(std::shared_ptr<Context> context, std::shared_ptr<SharedMemory> shared, bool imported) noexcept
      : context_(std::move(context)), shared_(std::move(shared)), imported_(imported) {}

  // What a query, a wait or a synchronize that begins now looks at; recording again does not change it.
  class Moment {
   public:
    Moment(Mark mark, std::shared_ptr<SharedMemory> shared, std::uint64_t ticket) noexcept
        : mark_(std::move(mark)), shared_(std::move(shared)), ticket_(ticket) {}
    [[nodiscard]] bool passed() const;
    void wait(const std::function<bool()>& give_up) const;
    // A stream of this process to wait for; null for an event of several processes.
    [[nodiscard]] const Mark& mark() const noexcept { return mark_; }

   private:
    Mark mark_;
    std::shared_ptr<SharedMemory> shared_;
    std::uint64_t ticket_;
  };
  [[nodiscard]] Moment now();
  void record(const std::shared_ptr<Stream>& stream, Fault fault);

  [[nodiscard]] Context& context() const noexcept { return *context_; }
  [[nodiscard]] const std::shared_ptr<SharedMemory>& shared() const noexcept { return shared_; }
  [[nodiscard]] bool imported() const noexcept { return imported_; }

 private:
  const std::shared_ptr<Context> context_;
  const std::shared_ptr<SharedMemory> shared_;  // null: of this process only
  const bool imported_;
  std::mutex mutex_;
  Mark mark_;
};

}  // namespace fastsync::fake

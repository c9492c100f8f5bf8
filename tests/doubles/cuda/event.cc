#include "doubles/cuda/event.h"

#include <utility>

namespace fastsync::fake {

bool Event::Moment::passed() const {
  return shared_ != nullptr ? shared_->control().has_passed(ticket_) : mark_.passed();
}

void Event::Moment::wait(const std::function<bool()>& give_up) const {
  if (shared_ == nullptr) {
    if (mark_.stream != nullptr) mark_.stream->wait_until(mark_.sequence, give_up);
    return;
  }
  ControlPage& page = shared_->control();
  while (!page.has_passed(ticket_) && !give_up()) {
    page.bell.sleep([&] { return page.has_passed(ticket_); }, kSlice);
  }
}

Event::Moment Event::now() {
  if (shared_ != nullptr) return {Mark(), shared_, shared_->control().recorded.load(std::memory_order_seq_cst)};
  const std::lock_guard lock(mutex_);
  return {mark_, nullptr, 0};
}

void Event::record(const std::shared_ptr<Stream>& stream, Fault fault) {
  Work work;
  work.what = "cuEventRecord";
  work.fault = fault;
  work.run = [](fastsync_fake_op&) { return CUDA_SUCCESS; };
  if (shared_ != nullptr) {
    const std::uint64_t ticket = shared_->control().recorded.fetch_add(1, std::memory_order_seq_cst) + 1;
    work.run = [shared = shared_, ticket](fastsync_fake_op&) {
      ControlPage& page = shared->control();
      auto& slot = page.passed[ticket % ControlPage::kTickets];
      std::uint64_t seen = slot.load();
      while (seen < ticket && !slot.compare_exchange_weak(seen, ticket, std::memory_order_seq_cst)) {
      }
      page.bell.ring();
      return CUDA_SUCCESS;
    };
  }
  // The mark is set with the record still queued behind whatever the stream has, so that nobody finds the old mark
  // after this returned.
  const std::lock_guard lock(mutex_);
  mark_ = stream->enqueue(std::move(work));
}

}  // namespace fastsync::fake

#include "doubles/cuda/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>

namespace fastsync::fake {

void Importers::add(pid_t pid) noexcept {
  for (auto& slot : pids_) {
    std::int32_t free = slot.load();
    // A process that was killed leaves its mark; its slot is as good as free.
    if (free != 0 && process_start(free)) continue;
    if (slot.compare_exchange_strong(free, pid)) return;
  }
}

void Importers::remove(pid_t pid) noexcept {
  for (auto& slot : pids_) {
    std::int32_t mine = pid;
    if (slot.compare_exchange_strong(mine, 0)) return;
  }
}

pid_t Importers::any_alive() const noexcept {
  for (const auto& slot : pids_) {
    const std::int32_t pid = slot.load();
    if (pid != 0 && pid != ::getpid() && process_start(pid)) return pid;
  }
  return 0;
}

std::optional<std::uint64_t> process_start(pid_t pid) noexcept {
  char path[32];
  std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
  const OwnedFd file(::open(path, O_RDONLY | O_CLOEXEC));
  if (!file) return std::nullopt;
  char text[1024];
  const ssize_t length = ::read(file.get(), text, sizeof text - 1);
  if (length <= 0) return std::nullopt;
  text[length] = '\0';
  // "pid (comm) state ...": comm may hold anything, so from the last ')'. State is field 3, the start is field 22.
  const char* at = std::strrchr(text, ')');
  if (at == nullptr || at[1] == '\0' || at[2] == 'Z' || at[2] == 'X') return std::nullopt;
  ++at;  // the blank before field 3
  for (int field = 3; field < 22 && at != nullptr; ++field) at = std::strchr(at + 1, ' ');
  if (at == nullptr) return std::nullopt;
  return std::strtoull(at, nullptr, 10);
}

bool SharedMemory::map(std::uint64_t nbytes) noexcept {
  const std::uint64_t data_bytes = round_up(nbytes, kPageBytes);
  void* memory = ::mmap(nullptr, data_bytes + kPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
  if (memory == MAP_FAILED) return false;
  data_ = static_cast<std::byte*>(memory);
  mapped_bytes_ = data_bytes + kPageBytes;
  nbytes_ = nbytes;
  control_ = reinterpret_cast<ControlPage*>(data_ + data_bytes);
  return true;
}

std::shared_ptr<SharedMemory> SharedMemory::create(std::uint64_t nbytes, const Uuid& uuid) {
  std::shared_ptr<SharedMemory> made(new SharedMemory);
  made->fd_ = OwnedFd(::memfd_create("fastsync-fake-cuda", MFD_CLOEXEC));
  const std::uint64_t file_bytes = round_up(nbytes, kPageBytes) + kPageBytes;
  if (!made->fd_ || ::ftruncate(made->fd_.get(), static_cast<off_t>(file_bytes)) != 0 || !made->map(nbytes)) {
    throw std::bad_alloc();
  }
  new (made->control_) ControlPage;
  made->control_->nbytes = nbytes;
  made->control_->uuid = uuid;
  return made;
}

std::shared_ptr<SharedMemory> SharedMemory::open(OwnedFd fd) noexcept {
  struct stat status{};
  if (!fd || ::fstat(fd.get(), &status) != 0) return nullptr;
  const auto file_bytes = static_cast<std::uint64_t>(status.st_size);
  if (!S_ISREG(status.st_mode) || file_bytes < 2 * kPageBytes || file_bytes % kPageBytes != 0) return nullptr;
  std::shared_ptr<SharedMemory> opened(new SharedMemory);
  opened->fd_ = std::move(fd);
  if (!opened->map(file_bytes - kPageBytes)) return nullptr;
  const ControlPage& control = opened->control();
  if (control.magic != ControlPage::kMagic || round_up(control.nbytes, kPageBytes) != opened->nbytes_) return nullptr;
  opened->nbytes_ = control.nbytes;
  return opened;
}

std::shared_ptr<SharedMemory> SharedMemory::open(const IpcTicket& ticket) noexcept {
  if (process_start(ticket.pid) != ticket.pid_start) return nullptr;
  const std::string path = "/proc/" + std::to_string(ticket.pid) + "/fd/" + std::to_string(ticket.fd);
  OwnedFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  struct stat status{};
  if (!fd || ::fstat(fd.get(), &status) != 0) return nullptr;
  if (status.st_dev != ticket.device || status.st_ino != ticket.inode) return nullptr;
  return open(std::move(fd));
}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) ::munmap(data_, mapped_bytes_);
}

IpcTicket SharedMemory::ticket(std::uint32_t kind) const noexcept {
  IpcTicket made;
  made.kind = kind;
  made.pid = ::getpid();
  made.pid_start = process_start(made.pid).value_or(0);
  made.fd = fd_.get();
  made.nbytes = nbytes_;
  struct stat status{};
  if (::fstat(made.fd, &status) == 0) {
    made.device = status.st_dev;
    made.inode = status.st_ino;
  }
  return made;
}

}  // namespace fastsync::fake

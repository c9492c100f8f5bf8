// What fastsync needs of DLPack, declared from its specification (version 1.3; layout fixed within major version 1).
#pragma once

#include <cstdint>

namespace fastsync::binding {

struct DlDevice {
  std::int32_t type;
  std::int32_t id;
};
struct DlDataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};
struct DlTensor {
  void* data;
  DlDevice device;
  std::int32_t ndim;
  DlDataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};
struct DlExchangeHeader {
  std::uint32_t major;
  std::uint32_t minor;
  DlExchangeHeader* previous;
};
struct DlExchange {
  DlExchangeHeader header;
  void* allocate;
  void* managed_from_object;
  void* object_from_managed;
  int (*tensor_from_object)(void* object, void* tensor_out);
  void* current_stream;
};
struct DlManagedVersioned {
  std::uint32_t major;
  std::uint32_t minor;
  void* context;
  void (*deleter)(DlManagedVersioned*);
  std::uint64_t flags;
  DlTensor tensor;
};
inline constexpr std::int32_t kDlCpu = 1;
inline constexpr std::int32_t kDlCuda = 2;
inline constexpr std::int32_t kDlPinned = 3;

[[nodiscard]] inline std::uint32_t dtype_key(const DlDataType& t) noexcept {
  return (std::uint32_t{t.code} << 24U) | (std::uint32_t{t.bits} << 16U) | t.lanes;
}

// Strides in elements; none for a row-major tensor.
[[nodiscard]] inline bool row_major(const std::int64_t* shape, const std::int64_t* strides,
                                    std::int32_t ndim) noexcept {
  if (strides == nullptr) return true;
  std::int64_t expected = 1;
  for (std::int32_t d = ndim - 1; d >= 0; --d) {
    if (shape[d] == 0) return true;
    if (shape[d] != 1 && strides[d] != expected) return false;
    expected *= shape[d];
  }
  return true;
}

[[nodiscard]] inline bool knows_device(const DlDevice& device) {
  return device.type == kDlCpu || device.type == kDlPinned || device.type == kDlCuda;
}
// The CUDA ordinal; -1: host memory.
[[nodiscard]] inline int ordinal_of(const DlDevice& device) { return device.type == kDlCuda ? device.id : -1; }

}  // namespace fastsync::binding

#include "doubles/cuda/copy_launch.h"

#include <bit>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"
#include "device/copy_kernel.h"
#include "doubles/cuda/driver.h"

namespace fastsync::fake {
namespace {

constexpr std::uint64_t kMaxDimensions = 64;
constexpr std::uint64_t kPieceAlignment = 256;

// A launch's arguments with every pointer replaced by where the memory is in this process.
class LaunchOnHost {
 public:
  LaunchOnHost(fastsync_fake_op& op, CopyDirection direction, const CopyArgs& args)
      : op_(op), direction_(direction), args_(args) {}

  // False: a GPU would have faulted.
  [[nodiscard]] bool translate() {
    const bool packs = direction_ == CopyDirection::kPack;
    if (args_.count != 0) {
      const auto* table = at<CopyPiece>(args_.pieces, args_.count, false);
      if (table == nullptr) return false;
      pieces_.assign(table, table + args_.count);
    }
    if (args_.used_bytes != 0) {
      auto* bucket = at<std::byte>(args_.bucket, args_.used_bytes, packs);
      if (bucket == nullptr) return false;
      args_.bucket = bucket;
    }
    if (args_.sum != nullptr) {
      args_.sum = at<Checksum>(args_.sum, 1, true);
      if (args_.sum == nullptr) return false;
    }
    std::uint64_t end = 0;
    for (CopyPiece& piece : pieces_) {
      if (piece.bucket_offset < end || piece.bucket_offset % kPieceAlignment != 0 || piece.nbytes == 0) {
        complain("pieces are not in order, overlap, are empty or do not begin at a multiple of 256 bytes");
        return false;
      }
      end = piece.bucket_offset + piece.nbytes;
      if (end > args_.used_bytes) {
        complain("a piece ends behind used_bytes");
        return false;
      }
      if (packs) op_.written.push_back({args_.bucket + piece.bucket_offset, piece.nbytes});
      if (piece.address == 0 && !packs) continue;
      if (!(piece.layout == 0 ? translate_contiguous(piece) : translate_strided(piece))) return false;
    }
    args_.pieces = pieces_.data();
    if (!layouts_.empty()) args_.layouts = layouts_.data();
    return true;
  }

  void run() { copy_on_host(direction_, args_); }

 private:
  // The host address of device memory that holds `count` of T.
  template <typename T>
  [[nodiscard]] T* at(const T* address, std::uint64_t count, bool writes) {
    const auto number = reinterpret_cast<std::uint64_t>(address);
    if (number % alignof(T) != 0) {
      complain("a table is not aligned");
      return nullptr;
    }
    return reinterpret_cast<T*>(op_.translate(number, count * sizeof(T), writes));
  }

  [[nodiscard]] bool translate_contiguous(CopyPiece& piece) {
    const bool writes = direction_ == CopyDirection::kUnpack;
    std::byte* host = op_.translate(piece.address, piece.nbytes, writes);
    if (host == nullptr) return false;
    if (writes) op_.written.push_back({host, piece.nbytes});
    piece.address = reinterpret_cast<std::uint64_t>(host);
    return true;
  }

  [[nodiscard]] bool translate_strided(CopyPiece& piece) {
    if (args_.layouts == nullptr) {
      complain("a piece has a layout, and the launch has none");
      return false;
    }
    const std::uint64_t* header = words(piece.layout - 1, kCopyLayoutHeaderWords);
    if (header == nullptr) return false;
    const std::uint64_t dimensions = header[0];
    const std::uint64_t itemsize = header[1];
    if (dimensions == 0 || dimensions > kMaxDimensions || !std::has_single_bit(itemsize) || itemsize > 16) {
      complain("a layout has " + std::to_string(dimensions) + " dimensions and items of " + std::to_string(itemsize) +
               " bytes");
      return false;
    }
    const std::uint64_t* layout = words(piece.layout - 1, kCopyLayoutHeaderWords + 2 * dimensions);
    if (layout == nullptr) return false;
    const std::uint64_t* sizes = layout + kCopyLayoutHeaderWords;
    const std::uint64_t* strides = sizes + dimensions;

    // From the lowest to the highest byte of the view, which lies in one allocation.
    std::int64_t low = 0;
    std::int64_t high = 0;
    std::uint64_t items = 1;
    for (std::uint64_t i = 0; i < dimensions; ++i) {
      if (sizes[i] == 0) {
        complain("a layout is empty");
        return false;
      }
      const auto reach = static_cast<std::int64_t>(sizes[i] - 1) * static_cast<std::int64_t>(strides[i]);
      (reach < 0 ? low : high) += reach;
      items *= sizes[i];
    }
    if (piece.tensor_offset % itemsize != 0 || piece.tensor_offset + piece.nbytes > items * itemsize) {
      complain("a piece is not inside its layout's view");
      return false;
    }
    const bool writes = direction_ == CopyDirection::kUnpack;
    std::byte* lowest = op_.translate(piece.address + static_cast<std::uint64_t>(low),
                                      static_cast<std::uint64_t>(high - low) + itemsize, writes);
    if (lowest == nullptr) return false;
    std::byte* origin = lowest - low;
    piece.address = reinterpret_cast<std::uint64_t>(origin);
    if (writes) {
      std::byte* first = origin;
      std::uint64_t item = piece.tensor_offset / itemsize;
      for (std::uint64_t i = dimensions; i-- > 0; item /= sizes[i]) {
        first += static_cast<std::int64_t>(item % sizes[i]) * static_cast<std::int64_t>(strides[i]);
      }
      op_.written.push_back({first, itemsize});
    }
    piece.layout = keep(layout, kCopyLayoutHeaderWords + 2 * dimensions);
    return true;
  }

  [[nodiscard]] const std::uint64_t* words(std::uint64_t begin, std::uint64_t count) {
    return at<std::uint64_t>(args_.layouts + begin, count, false);
  }
  // Copies a layout, so that it is where the kernel looks for it; its place plus one.
  [[nodiscard]] std::uint64_t keep(const std::uint64_t* layout, std::uint64_t count) {
    const std::uint64_t place = layouts_.size() + 1;
    layouts_.insert(layouts_.end(), layout, layout + count);
    return place;
  }

  void complain(const std::string& text) { driver().violation("bad-launch: " + text, op_.what); }

  fastsync_fake_op& op_;
  const CopyDirection direction_;
  CopyArgs args_;
  std::vector<CopyPiece> pieces_;
  std::vector<std::uint64_t> layouts_;
};

}  // namespace

CUresult run_copy(fastsync_fake_op& op, CopyDirection direction, const CopyArgs& args) {
  LaunchOnHost launch(op, direction, args);
  if (!launch.translate()) return CUDA_ERROR_ILLEGAL_ADDRESS;
  try {
    launch.run();
  } catch (const Error& error) {
    driver().violation(std::string("misaligned: ") + error.what(), op.what);
    return CUDA_ERROR_MISALIGNED_ADDRESS;
  }
  return CUDA_SUCCESS;
}

}  // namespace fastsync::fake

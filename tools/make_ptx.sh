#!/usr/bin/env bash
# Compiles the copy kernel into csrc/device/cuda/copy_kernel_ptx.h, which is checked in: make_ptx.sh [FILE]
#
# Needs nvcc (on PATH, in $CUDA_HOME/bin or in /usr/local/cuda/bin); no build does. `make_ptx.sh --hash` prints the
# fingerprint of the sources, and needs nothing. Run it when tools/check_ptx.sh says that the file is out of date.
set -euo pipefail
cd "$(dirname "$0")/.."
export LC_ALL=C

SOURCES=(csrc/common/checksum.h csrc/device/copy_access.h csrc/device/copy_args.h csrc/device/copy_kernel.h
  csrc/device/cuda/copy_kernel.cu)
# sm_75 (Turing) is the oldest that nvcc 13 knows. PTX 8.0 is what the oldest supported driver, CUDA 12.0's, reads. nvcc
# labels its output with its own version, whatever the code needs, and the driver goes by the label. ptxas checks that
# the code keeps to the label it is given: it takes ours from 6.3 on, which sm_75 came with.
ARCH=compute_75
PTX_VERSION=8.0

# Of the code: lines that are comments may change without the need of a compiler.
hash_of_sources() {
  grep -v '^[[:space:]]*//' "${SOURCES[@]}" | sha256sum | cut -d' ' -f1
}

if [ "${1:-}" = --hash ]; then
  hash_of_sources
  exit
fi
output=${1:-csrc/device/cuda/copy_kernel_ptx.h}

PATH="$PATH:${CUDA_HOME:-/usr/local/cuda}/bin"
command -v nvcc >/dev/null || { echo "nvcc not found; install a CUDA toolkit or set CUDA_HOME" >&2; exit 1; }
release=$(nvcc --version | sed -n 's/^.*, V\([0-9.]*\)$/\1/p')
FLAGS=(-std=c++20 -O3 -Icsrc "-arch=$ARCH")

included=$(nvcc "${FLAGS[@]}" -MM csrc/device/cuda/copy_kernel.cu | grep -o 'csrc/[^ \\]*' | sort -u | tr '\n' ' ')
if [ "$included" != "${SOURCES[*]} " ]; then
  echo "the kernel is made from: $included" >&2
  echo "but SOURCES in $0 lists: ${SOURCES[*]}" >&2
  exit 1
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
nvcc "${FLAGS[@]}" -ptx -o "$scratch/copy_kernel.ptx" csrc/device/cuda/copy_kernel.cu
# The image starts with its version: no comments before it, and none at the ends of lines. nvcc puts hashes of the source's
# whole path into the names of what is internal to it; the file has to come out the same in every folder.
sed -E -e 's:[[:space:]]*//.*$::' -e 's:_[0-9a-f]{8}_14_copy_kernel_cu_[0-9a-f]{8}:_00000000_14_copy_kernel_cu_00000000:g' \
  -e "s:^\.version .*:.version $PTX_VERSION:" "$scratch/copy_kernel.ptx" |
  sed -E -e '/^[[:space:]]*$/d' >"$scratch/stripped.ptx"
if [ "$(head -n 1 "$scratch/stripped.ptx")" != ".version $PTX_VERSION" ]; then
  echo "nvcc's output does not begin with .version" >&2
  exit 1
fi

cat >"$scratch/header.h" <<HEADER
// Made by tools/make_ptx.sh, not by hand.
//
// The multi-tensor copy (device/copy_kernel.h) for every GPU from Turing on and every driver from CUDA 12.0 on: the
// driver compiles it for the device at hand and caches the result. Zero-terminated; begins with ".version".
//
// sources sha256, without comments: $(hash_of_sources)
// nvcc $release ${FLAGS[*]} -ptx
// .version is relabelled as $PTX_VERSION, which tools/check_ptx.sh has ptxas confirm.
#pragma once

namespace fastsync {

// clang-format off
inline constexpr char kCopyKernelPtx[] = R"ptx(
HEADER
{
  head -c -1 "$scratch/header.h"  # no newline between the quote and .version
  cat "$scratch/stripped.ptx"
  cat <<'FOOTER'
)ptx";
// clang-format on

}  // namespace fastsync
FOOTER
} >"$scratch/result.h"
mv "$scratch/result.h" "$output"

#!/usr/bin/env bash
# Checks csrc/device/cuda/copy_kernel_ptx.h: made from the sources as they are, and assembled by ptxas for every
# generation of GPU without spilling a register. Prints what each kernel uses.
#
# Exits 1 for what is wrong, and 77 where nothing is but ptxas is not there to look. Where nvcc is the very version that
# made the file, the file is also made anew and compared.
set -euo pipefail
cd "$(dirname "$0")/.."

PTX=csrc/device/cuda/copy_kernel_ptx.h
ARCHITECTURES=(sm_75 sm_80 sm_90 sm_100 sm_120)

fail() {
  echo "$PTX: $1" >&2
  exit 1
}

recorded=$(sed -n 's/^.. sources sha256, without comments: //p' "$PTX")
[ "$recorded" = "$(tools/make_ptx.sh --hash)" ] || fail "out of date with its sources; run tools/make_ptx.sh"

PATH="$PATH:${CUDA_HOME:-/usr/local/cuda}/bin"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

if ! command -v ptxas >/dev/null; then
  echo "$PTX: up to date. NOT assembled: there is no ptxas on PATH, in \$CUDA_HOME/bin or in /usr/local/cuda/bin."
  exit 77
fi
if command -v nvcc >/dev/null && grep -qF "// nvcc $(nvcc --version | sed -n 's/^.*, V\([0-9.]*\)$/\1/p') " "$PTX"; then
  tools/make_ptx.sh "$scratch/again.h"
  cmp -s "$scratch/again.h" "$PTX" || fail "is not what nvcc makes of its sources; run tools/make_ptx.sh"
fi

sed -n '/R"ptx(/,/^)ptx"/p' "$PTX" | sed -e 's/^.*R"ptx(//' -e '/^)ptx"/d' >"$scratch/copy_kernel.ptx"
for architecture in "${ARCHITECTURES[@]}"; do
  report=$(ptxas -v --warn-on-spills --gpu-name "$architecture" -o "$scratch/copy_kernel.cubin" \
    "$scratch/copy_kernel.ptx" 2>&1) || fail "ptxas refuses it for $architecture: $report"
  for kernel in fastsync_pack fastsync_unpack; do
    # Below the name: "N bytes stack frame, N bytes spill stores, N bytes spill loads", then "Used N registers, ...".
    lines=$(grep -A 2 "Function properties for $kernel\$" <<<"$report") || fail "has no kernel $kernel"
    memory=$(grep -o '[0-9]* bytes stack frame, [0-9]* bytes spill stores, [0-9]* bytes spill loads' <<<"$lines") ||
      fail "cannot read what ptxas says of $kernel: $report"
    registers=$(grep -o 'Used [0-9]* registers' <<<"$lines") || fail "cannot read what ptxas says of $kernel: $report"
    echo "$architecture $kernel: ${registers#Used }, $memory"
    [ "$memory" = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" ] ||
      fail "$kernel spills on $architecture"
  done
done

#!/usr/bin/env bash
# Builds fastsync for this machine's GPU, runs `pytest -m gpu`, measures for less than four minutes, and appends to RESULTS.md.
# Needs a driver, a torch with CUDA, and for the build a C++20 compiler; no network, no CMake, and it installs nothing.
#
#   bench/gpu/run.sh [--dry-run] [--no-tests] [--only PART ...] [--out FOLDER]
#
#   PYTHON               the interpreter that has that torch (default: FASTSYNC_GPU_VENV's, then .venv's, then python3)
#   FASTSYNC_GPU_BUILD   folder of the build (default: build/gpu); with FASTSYNC_GPU_SKIP_BUILD=1 it is taken as it is
#   FASTSYNC_GPU_CORE    a libfastsync_core.a that CMake has built: nothing is built but the probe, fastsync is the installed one
#   FASTSYNC_TEST_DOUBLES    --dry-run: folder of the built test doubles (default: build/cpp/tests/doubles)
#   JOBS                 compilers at a time (default: all cores)
set -euo pipefail
cd "$(dirname "$0")/../.."
command_line="bench/gpu/run.sh${*:+ $*}"

dry_run=0
tests=1
arguments=()
for argument in "$@"; do
  case "$argument" in
    --no-tests) tests=0 ;;
    --dry-run) dry_run=1; tests=0; arguments+=("$argument") ;;
    *) arguments+=("$argument") ;;
  esac
done

if [[ -z "${PYTHON:-}" ]]; then
  for candidate in "${FASTSYNC_GPU_VENV:+$FASTSYNC_GPU_VENV/bin/python}" .venv/bin/python python3; do
    if [[ -n "$candidate" ]] && "$candidate" -c 'import torch' 2>/dev/null; then
      PYTHON=$candidate
      break
    fi
  done
fi
if [[ -z "${PYTHON:-}" ]]; then
  echo 'no Python here has torch; set PYTHON to one that has' >&2
  exit 2
fi

# A measurement must not meet a double that somebody's shell still names, nor a dry run a device.
doubles=${FASTSYNC_TEST_DOUBLES:-build/cpp/tests/doubles}
unset FASTSYNC_CUDA_PATH FASTSYNC_ALLOW_FAKE FASTSYNC_TEST_DOUBLES
if [[ $dry_run == 1 ]]; then
  if [[ ! -e "$doubles/libfastsync_fake_cuda.so" ]]; then
    echo "no test doubles in $doubles; make doubles builds them, FASTSYNC_TEST_DOUBLES names another folder" >&2
    exit 2
  fi
  doubles=$(cd "$doubles" && pwd)
  export FASTSYNC_CUDA_PATH=$doubles/libfastsync_fake_cuda.so FASTSYNC_NCCL_PATH=$doubles/nccl/libfastsync_fake_nccl.so
  export FASTSYNC_ALLOW_FAKE=1 FASTSYNC_FAKE_DEVICES=1 FASTSYNC_FAKE_DELAY_US=0 FASTSYNC_FAKE_NCCL_VERSION=23007
fi

# Before minutes are spent on a build.
"$PYTHON" -m bench.gpu --check $([[ $dry_run == 0 ]] || echo --dry-run) || exit 2

built=${FASTSYNC_GPU_BUILD:-build/gpu}
if [[ "${FASTSYNC_GPU_SKIP_BUILD:-0}" != 1 ]] && ! "$PYTHON" -m bench.gpu.build ${FASTSYNC_GPU_CORE:+"$FASTSYNC_GPU_CORE"} >/dev/null; then
  echo '*** fastsync was NOT built, see above: going on with what is installed, and with what needs none of it. ***'
fi
if [[ -d "$built/fastsync" && -z "${FASTSYNC_GPU_CORE:-}" ]]; then
  PYTHONPATH=$(cd "$built" && pwd)${PYTHONPATH:+:$PYTHONPATH}
  export PYTHONPATH
fi

said='not run'
if [[ $tests == 1 ]]; then
  if ! "$PYTHON" -c 'import pytest' 2>/dev/null; then
    said='not run: this Python has no pytest'
  elif ! "$PYTHON" -c 'import fastsync' 2>/dev/null; then
    said='not run: fastsync is not there'
  elif [[ ! -d tests/python/device ]]; then
    said='not run: there is no tests/python/device'
  else
    # Without the options of pyproject.toml, which ask for plugins that may not be here.
    seconds=${FASTSYNC_GPU_TESTS_S:-240}
    log=$(mktemp)
    code=0
    timeout -k 10 "$seconds" "$PYTHON" -m pytest -m gpu tests/python/device -q -o addopts=-ra -p no:cacheprovider 2>&1 |
      tee "$log" || code=$?
    said=$(grep . "$log" | tail -n 1 | tr -d '=' | sed 's/^ *//; s/ *$//') # pytest's summary: passed, skipped
    rm -f "$log"
    case $code in
      0) ;;
      5) said="selected nothing ($said)" ;;
      124 | 137) said="FAILED: not done within $seconds s" ;;
      *) said="FAILED: $said" ;;
    esac
  fi
  echo "pytest -m gpu: $said"
fi

code=0
"$PYTHON" -m bench.gpu ${arguments[@]+"${arguments[@]}"} --tests "$said" --command "$command_line" || code=$?
[[ "$said" != FAILED* ]] || code=1
exit "$code"

#!/usr/bin/env bash
# Runs clang-tidy over the core: clang_tidy.sh BUILD_FOLDER (the one with compile_commands.json).
set -euo pipefail
git ls-files --cached --others --exclude-standard 'csrc/*.cc' ':!csrc/binding' |
  xargs -r -n 4 -P "${JOBS:-$(nproc)}" clang-tidy --quiet --extra-arg=-Wno-unknown-warning-option --warnings-as-errors='*' -p "$1"

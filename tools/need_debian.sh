#!/usr/bin/env bash
# Makes sure that Debian packages are there: need_debian.sh PACKAGE...
#
# As root it installs what is missing. Otherwise it prints the command that would, and exits 1.
set -euo pipefail

missing=()
for package in "$@"; do
  # Not dpkg's database alone: a compiler or CMake may have come another way.
  case "$package" in
    g++) command -v c++ >/dev/null || missing+=("$package") ;;
    *) dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package") ;;
  esac
done
[ ${#missing[@]} -eq 0 ] && exit 0

install="apt-get install -y --no-install-recommends ${missing[*]}"
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
  echo "missing: ${missing[*]}. Install with: sudo $install" >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
# Without package lists (a fresh container) the first try fails.
$install >/dev/null 2>&1 || { apt-get update -qq && $install >/dev/null; }

#!/usr/bin/env bash
# Installs the packages of tools/services.txt whose program is missing.
#
# A package that cannot be installed causes one line of warning, and the tests that need it are skipped.
# With CI=true it is a failure, because the suite must not skip tests there.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
. "$here/apt.sh"
list="${PENSTOCK_SERVICES:-$here/services.txt}"
# Debian keeps servers in sbin, which is not on every user's path.
PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"

missing() {
  local package program
  while read -r package program; do
    case "$package" in '' | '#'*) continue ;; esac
    command -v "$program" >/dev/null || echo "$package"
  done <"$list"
}

wanted="$(missing | xargs)"
[ -n "$wanted" ] || exit 0

echo "installing for the tests: $wanted"
# Word splitting is intended: each package is one argument.
# shellcheck disable=SC2086
apt_install $wanted || true

wanted="$(missing | xargs)"
[ -n "$wanted" ] || exit 0
if [ "${CI:-}" = "true" ]; then
  echo "FAILED: could not install $wanted, and CI must not skip their tests" >&2
  exit 1
fi
echo "WARNING: could not install $wanted; the tests that need them WILL BE SKIPPED" >&2

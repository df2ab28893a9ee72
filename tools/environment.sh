#!/usr/bin/env bash
# Creates the virtual environment named by $1, if it does not exist, and installs Penstock into it:
# with "serving" as $2 only what a server needs, with "development" the extra `dev` too.
#
# Debian ships Python without ensurepip unless python3-venv is installed, so `python3 -m venv` may fail on
# a fresh machine. Then others are tried, those that change the machine least first: uv, virtualenv,
# virtualenv installed by pip into a temporary directory, and last the Debian package.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/apt.sh
venv="$1"
size="$2"

new_enough() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
    if new_enough "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  echo "penstock: Python 3.11 or newer is needed; choose one with PYTHON=/path/to/python" >&2
  return 1
}

virtualenv_by_pip() {
  local scratch status=0
  scratch="$(mktemp -d)"
  "$python" -m pip install --quiet --target "$scratch" virtualenv &&
    PYTHONPATH="$scratch" "$python" -m virtualenv --quiet "$venv" || status=$?
  rm -rf "$scratch"
  return "$status"
}

venv_by_apt() {
  local version
  version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
  apt_install "python$version-venv" && "$python" -m venv "$venv"
}

# A failed attempt leaves an incomplete environment, which would make the next one fail.
attempt() {
  "$@" >/dev/null 2>&1 && "$venv/bin/python" -m pip --version >/dev/null 2>&1 && return
  rm -rf "$venv"
  return 1
}

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  python="$(find_python)"
  echo "creating $venv with $("$python" --version)"
  rm -rf "$venv"
  attempt "$python" -m venv "$venv" ||
    attempt uv venv --quiet --seed --python "$python" "$venv" ||
    attempt "$python" -m virtualenv --quiet "$venv" ||
    attempt virtualenv_by_pip ||
    attempt venv_by_apt || {
    echo "penstock: could not create $venv; as root, apt-get install python3-venv, and try again" >&2
    exit 1
  }
fi

case "$size" in
serving) wanted='.' ;;
development) wanted='.[dev]' ;;
*) echo "penstock: there is no environment for $size" >&2 && exit 1 ;;
esac
echo "installing penstock for $size into $venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$wanted"

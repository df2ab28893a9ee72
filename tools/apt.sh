# Sourced by the other scripts: installs Debian packages.

# Install the named packages as root or through sudo; fail without any change where neither is possible.
apt_install() {
  command -v apt-get >/dev/null || return 1
  local as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || return 1
    as_root=(sudo)
    # Without a terminal a password prompt would wait without end.
    [ -t 0 ] || as_root+=(-n)
  fi
  local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq)
  # If the update fails, the install is tried with the old package index.
  "${apt[@]}" update >&2 || true
  "${apt[@]}" install --yes --no-install-recommends "$@" >&2
}

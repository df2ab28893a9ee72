# Sourced by the other scripts: the one place that knows how to install a Debian package.

# Install the named packages as root or through sudo; fail, having changed nothing, where neither is possible.
apt_install() {
  command -v apt-get >/dev/null || return 1
  local as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || return 1
    as_root=(sudo)
    # Without a terminal a password prompt would hang for ever.
    [ -t 0 ] || as_root+=(-n)
  fi
  local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq)
  # A stale package index is worth trying with: the install below is what decides.
  "${apt[@]}" update >&2 || true
  "${apt[@]}" install --yes --no-install-recommends "$@" >&2
}

#!/usr/bin/env bash
# A Chromium for the browser tests: the one that is there, else Debian's or Ubuntu's package where it may be installed.
set -eu -o pipefail

found() {
  [ -n "${SPANMILL_CHROMIUM:-}" ] && [ -x "$SPANMILL_CHROMIUM" ] || command -v chromium chromium-browser google-chrome >/dev/null
}

found && exit 0
if command -v apt-get >/dev/null; then
  root=()
  [ "$(id -u)" = 0 ] || root=(sudo -n)
  "${root[@]}" apt-get install --yes --no-install-recommends chromium fonts-dejavu-core </dev/null ||
    { "${root[@]}" apt-get update </dev/null && "${root[@]}" apt-get install --yes --no-install-recommends chromium fonts-dejavu-core </dev/null; } || true
fi
found && exit 0
echo "the browser tests need Chromium: install it (Debian: apt install chromium), or set SPANMILL_CHROMIUM to its program" >&2
exit 1

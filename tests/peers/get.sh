#!/usr/bin/env bash
# Gets the collectors that tests with the marker `peer` run: the Go collector, built from Debian packages (minutes, and needs
# apt), and Rotel from PyPI. What is there already stays. usage: get.sh FOLDER
set -euo pipefail
folder=$(realpath -m "$1"); here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$folder"
[ -x "$folder/otelcol" ] || "$here/otelcol/build.sh" "$folder/otelcol" "$folder/build"
[ -d "$folder/rotel" ] || { python3 -m venv "$folder/rotel" && "$folder/rotel/bin/pip" install --quiet rotel; }

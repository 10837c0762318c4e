#!/bin/sh
# Builds fake-gcs-server, an emulator of Google Cloud Storage, from the Go module proxy into a
# directory, and prints its path. It needs Go.
#
# usage: get-fake-gcs.sh DIRECTORY
set -eu
mkdir -p "$1"
bin=$(cd "$1" && pwd)
[ -x "$bin/fake-gcs-server" ] || GOBIN=$bin go install github.com/fsouza/fake-gcs-server@latest >&2
echo "$bin/fake-gcs-server"

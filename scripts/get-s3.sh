#!/bin/sh
# Builds an S3 server (versitygw, which serves a folder) from the Go module proxy into a directory,
# and prints its path. It needs Go.
#
# usage: get-s3.sh DIRECTORY
set -eu
mkdir -p "$1"
bin=$(cd "$1" && pwd)
[ -x "$bin/versitygw" ] || GOBIN=$bin go install github.com/versity/versitygw/cmd/versitygw@latest >&2
echo "$bin/versitygw"

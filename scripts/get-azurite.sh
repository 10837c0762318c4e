#!/bin/sh
# Installs Azurite, Microsoft's emulator of Azure Blob Storage, from the npm registry into a
# directory, and prints the path of its program. It needs Node.js.
#
# usage: get-azurite.sh DIRECTORY
set -eu
mkdir -p "$1"
dir=$(cd "$1" && pwd)
bin=$dir/node_modules/.bin/azurite-blob
[ -x "$bin" ] || npm install --silent --no-audit --no-fund --prefix "$dir" azurite >&2
echo "$bin"

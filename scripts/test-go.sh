#!/bin/sh
# Tests the Go module with the C library's static archive: go vet, go test -race. PROFILE is the
# profile of Cargo (dev by default). Needs Go 1.23 or newer, pkg-config and a C compiler.
set -eu
cd "$(dirname "$0")/.."
prefix=$PWD/target/go
sh scripts/build-c.sh --static --profile "${PROFILE:-dev}" "$prefix"
export PKG_CONFIG_PATH="$prefix/lib/pkgconfig"
# A module has its own copies: Go leaves out links.
cmp LICENSE-MIT bindings/go/LICENSE-MIT
cmp LICENSE-APACHE bindings/go/LICENSE-APACHE
cd bindings/go
unformatted=$(gofmt -l .)
[ -z "$unformatted" ] || { echo "gofmt would change: $unformatted"; exit 1; }
go vet ./...
go test -race ./...

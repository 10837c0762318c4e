#!/bin/sh
# Compares the public API of the library with docs/public-api.txt, so that a
# change of it is seen; with --write, writes that file. Warnings of rustdoc are
# errors.
#
# rustdoc's JSON, which the API is read from, has a version. Where this
# toolchain writes another one than the reader knows, nothing is compared.
set -eu
cd "$(dirname "$0")/.."
known=57
target=${CARGO_TARGET_DIR:-target}
RUSTC_BOOTSTRAP=1 cargo rustdoc -p zebu --lib --quiet -- \
    -Z unstable-options --output-format json -D warnings
json=$target/doc/zebu.json
version=$(grep -o '"format_version":[0-9]*' "$json" | tail -n 1 | cut -d : -f 2)
if [ "$version" != "$known" ]; then
    echo "public API: skipped: $(rustc --version) writes version $version of rustdoc's JSON, not $known" >&2
    exit 0
fi
cargo run --quiet --manifest-path scripts/public-api/Cargo.toml --target-dir "$target/public-api" \
    -- "$json" > "$target/public-api.txt"
if [ "${1:-}" = --write ]; then
    cp "$target/public-api.txt" docs/public-api.txt
elif ! diff -u docs/public-api.txt "$target/public-api.txt"; then
    echo "The public API differs from docs/public-api.txt." >&2
    echo "If that is meant, run: sh scripts/public-api.sh --write" >&2
    exit 1
fi

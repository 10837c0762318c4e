#!/bin/sh
# Runs the doc tests, and compares the public API of the library (of `zebu` and the crates that it re-exports),
# with the features that the workspace uses, with docs/public-api.txt, so that a change of it is seen; with --write,
# writes that file. Warnings of rustdoc are errors.
#
# rustdoc's JSON, which the API is read from, has a version. Where this toolchain writes another one than
# the reader knows, nothing is compared.
set -eu
cd "$(dirname "$0")/.."
known=57
# As scripts/test.sh has them, so that nothing is built twice.
features=zebu-cli/psk
target=${CARGO_TARGET_DIR:-target}
mkdir -p "$target/doc"
ZEBU_RUSTDOC_JSON=$(cd "$target/doc" && pwd)
export ZEBU_RUSTDOC_JSON
RUSTDOC=$PWD/scripts/rustdoc-json.sh cargo test --workspace --features "$features" --doc --quiet
json=$ZEBU_RUSTDOC_JSON/zebu.json
found=$ZEBU_RUSTDOC_JSON/public-api.txt
version=$(grep -o '"format_version":[0-9]*' "$json" | tail -n 1 | cut -d : -f 2)
if [ "$version" != "$known" ]; then
    echo "public API: skipped: $(rustc --version) writes version $version of rustdoc's JSON, not $known" >&2
    exit 0
fi
cargo build --workspace --features "$features" --bin zebu-public-api --quiet
"$target/debug/zebu-public-api" "$json" "$ZEBU_RUSTDOC_JSON/zebu_core.json" "$ZEBU_RUSTDOC_JSON/zebu_formats.json" \
    "$ZEBU_RUSTDOC_JSON/zebu_net.json" > "$found"
if [ "${1:-}" = --write ]; then
    cp "$found" docs/public-api.txt
elif ! diff -u docs/public-api.txt "$found"; then
    echo "The public API differs from docs/public-api.txt." >&2
    echo "If that is meant, run: sh scripts/public-api.sh --write" >&2
    exit 1
fi

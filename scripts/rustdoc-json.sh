#!/bin/sh
# Takes rustdoc's place when cargo runs doc tests (RUSTDOC): of the library, and of the crates that it
# re-exports, it also writes the JSON, at $ZEBU_RUSTDOC_JSON/CRATE.json, from the crates that are built for the
# tests. Only rustdoc is told to take unstable options: cargo would build crates anew that ask for
# RUSTC_BOOTSTRAP.
set -eu
case " $* " in
    *" --crate-name zebu "* | *" --crate-name zebu_core "* | *" --crate-name zebu_formats "* | *" --crate-name zebu_net "*) ;;
    *) exec rustdoc "$@" ;;
esac
rustdoc "$@"
# Without what only doc tests have.
for argument; do
    shift
    case $argument in
        --test) ;;
        --test-run-directory) skip=1 ;;
        *) [ "${skip:-}" ] && skip="" || set -- "$@" "$argument" ;;
    esac
done
RUSTC_BOOTSTRAP=1 exec rustdoc "$@" -Z unstable-options --output-format json -D warnings --out-dir "$ZEBU_RUSTDOC_JSON"

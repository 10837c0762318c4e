#!/bin/sh
# Takes rustc's place for the workspace's crates in the test command (RUSTC_WORKSPACE_WRAPPER): Clippy's driver
# compiles tests and programs, so that one build gives lints and tests. A library's lints are found when its own
# tests are compiled, so that it is not looked at twice. Warnings are errors, for Clippy by $CLIPPY_ARGS.
# zebu-core's unit tests are not optimised: that takes longer than they gain. With the scheduler of interleavings only
# warnings of the compiler count, since its types are large.
case " $* " in
    *'feature="interleavings"'*) exec "$@" -D warnings -C opt-level=0 ;;
    *" zebu-core/src/lib.rs "*" --test "*) exec clippy-driver "$@" -C opt-level=0 ;;
    *" --crate-type lib "*) exec "$@" -D warnings ;;
esac
exec clippy-driver "$@"

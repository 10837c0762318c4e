#!/bin/sh
# Compiles the adapters for virtual machine monitors (bindings/vmm) and runs their tests.
set -eu
cd "$(dirname "$0")/.."
CARGO_TARGET_DIR=$PWD/target/vmm cargo test --quiet --locked --manifest-path bindings/vmm/Cargo.toml

#!/bin/sh
# The tests of object stores and of Ceph, with real servers as far as they can be had.
set -eu
cd "$(dirname "$0")/.."
if server=$(sh scripts/get-s3.sh target/peers/s3); then export ZEBU_VERSITYGW="$server"; fi
if server=$(sh scripts/get-fake-gcs.sh target/peers/fake-gcs); then export ZEBU_FAKE_GCS="$server"; fi
if server=$(sh scripts/get-azurite.sh target/peers/azurite); then export ZEBU_AZURITE="$server"; fi
trap 'sh scripts/ceph.sh target/peers/ceph stop' EXIT
if conf=$(sh scripts/ceph.sh target/peers/ceph start); then export ZEBU_CEPH_CONF="$conf"; fi
cargo test -p zebu-cli --test remote -- stores:: uploads:: rbd::

#!/bin/sh
# All packages of zebu, in target/packages: static programs, archives, .deb, .rpm, an OCI image, what they
# are made of, and their checksums.
#
#   sh scripts/package.sh [TARGET...]    x86_64-unknown-linux-musl and aarch64-unknown-linux-musl by default
#
# scripts/static.sh builds the programs; it is left out for those that ZEBU_BUILT names: a folder with
# TARGET/zebu. cargo-deb and cargo-generate-rpm make the packages (`cargo install cargo-deb cargo-generate-rpm`).
# Times are those of the last commit, or SOURCE_DATE_EPOCH.
set -eu
cd "$(dirname "$0")/.."
for tool in cargo-deb cargo-generate-rpm; do
    command -v $tool > /dev/null || { echo "$tool is missing: cargo install $tool" >&2; exit 1; }
done
[ $# -gt 0 ] || set -- x86_64-unknown-linux-musl aarch64-unknown-linux-musl
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -n 1)
out=target/packages
stage=$out/stage
built=${ZEBU_BUILT:-target/dist}
rm -rf $out
mkdir -p $out

# Runs a program of another processor where QEMU's emulator of it is there.
run() {
    case $1 in
        *aarch64*) if [ "$(uname -m)" = aarch64 ]; then "$@"; else qemu-aarch64-static "$@"; fi ;;
        *) "$@" ;;
    esac
}

images=""
for target in "$@"; do
    [ -n "${ZEBU_BUILT:-}" ] || sh scripts/static.sh "$target"
    program=$built/$target/zebu
    rm -rf $stage
    mkdir -p $stage/doc $stage/completions
    install -m 755 "$program" $stage/zebu
    run "$program" manual $stage/man "$(date -u -d "@$SOURCE_DATE_EPOCH" +%F)"
    gzip -9n $stage/man/*.1
    run "$program" completions bash > $stage/completions/zebu
    run "$program" completions zsh > $stage/completions/_zebu
    run "$program" completions fish > $stage/completions/zebu.fish
    cp LICENSE-MIT LICENSE-APACHE README.md CHANGELOG.md $stage/doc
    python3 scripts/sbom.py $stage/doc "$target"
    cp $stage/doc/zebu.cdx.json "$out/zebu-$version-$target.cdx.json"

    case $target in
        x86_64*) deb=amd64 rpm=x86_64 oci=amd64 ;;
        aarch64*) deb=arm64 rpm=aarch64 oci=arm64 ;;
        *) echo "no packages for $target" >&2; exit 1 ;;
    esac
    for variant in "" qemu-names; do
        name=zebu${variant:+-$variant}
        cargo deb --quiet -p zebu-cli --no-build --no-strip --target "$target" ${variant:+--variant $variant} \
            --output "$out/${name}_${version}_$deb.deb"
        cargo generate-rpm -p zebu-cli --target "$target" --payload-compress zstd ${variant:+--variant $variant} \
            --source-date "$SOURCE_DATE_EPOCH" --output "$out/$name-$version-1.$rpm.rpm"
    done
    archive=zebu-$version-$target
    tar -C $stage --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner \
        --transform "s,^\.,$archive," -cf - . | gzip -9n > "$out/$archive.tar.gz"
    images="$images $oci=$program"
done
# shellcheck disable=SC2086 # a list of words
sh scripts/oci.sh $out/zebu-oci "$version" $images
tar -C $out/zebu-oci --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner \
    -cf "$out/zebu-$version-oci.tar" .
rm -rf $stage
(cd $out && sha256sum ./*.* > SHA256SUMS)
ls -l $out

#!/bin/sh
# All packages of zebu, in target/packages: static programs, archives, .deb, .rpm, an OCI image, what they
# are made of, and their checksums.
#
#   sh scripts/package.sh [TARGET...]    x86_64-unknown-linux-musl and aarch64-unknown-linux-musl by default
#
# scripts/static.sh builds the programs; it is left out for those that ZEBU_BUILT names: a folder with
# TARGET/zebu. cargo-deb and cargo-generate-rpm make the packages (`cargo install cargo-deb cargo-generate-rpm`).
# Man pages and completions, which are the same for all, are written by a program of this machine: the static
# one if it is among the targets, else ZEBU, else one that Cargo builds.
# Times are those of the last commit, or SOURCE_DATE_EPOCH.
set -eu
umask 022
cd "$(dirname "$0")/.."
for tool in cargo-deb cargo-generate-rpm; do
    command -v $tool > /dev/null || { echo "$tool is missing: cargo install $tool" >&2; exit 1; }
done
[ $# -gt 0 ] || set -- x86_64-unknown-linux-musl aarch64-unknown-linux-musl
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH
version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"$/\1/p' Cargo.toml)
out=target/packages
stage=$out/stage
built=${ZEBU_BUILT:-target/dist}
rm -rf $out
mkdir -p $out

# A tar archive of the files of a folder, the same for the same files.
archive() {
    tar --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --mode=u+rwX,go+rX,go-w \
        -C "$@" -cf - .
}

zebu=${ZEBU:-}
for target in "$@"; do
    [ -n "${ZEBU_BUILT:-}" ] || sh scripts/static.sh "$target"
    case $target in "$(uname -m)"-*) zebu=$built/$target/zebu ;; esac
done
if [ -z "$zebu" ]; then
    cargo build --locked -p zebu-cli
    zebu=${CARGO_TARGET_DIR:-target}/debug/zebu
fi
mkdir -p $stage/doc $stage/completions
"$zebu" manual $stage/man "$(date -u -d "@$SOURCE_DATE_EPOCH" +%F)"
gzip -9n $stage/man/*.1
"$zebu" completions bash > $stage/completions/zebu
"$zebu" completions zsh > $stage/completions/_zebu
"$zebu" completions fish > $stage/completions/zebu.fish
install -m 644 LICENSE-MIT LICENSE-APACHE README.md CHANGELOG.md $stage/doc

images=""
for target in "$@"; do
    program=$built/$target/zebu
    install -m 755 "$program" $stage/zebu
    # shellcheck disable=SC2046 # a list of words
    python3 scripts/sbom.py $stage/doc "$target" zebu-cli $(sh scripts/static.sh --features)
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
    name=zebu-$version-$target
    archive $stage --transform "s,^\.,$name," | gzip -9n > "$out/$name.tar.gz"
    images="$images $oci=$program"
done
# shellcheck disable=SC2086 # a list of words
sh scripts/oci.sh $out/zebu-oci "$version" $images
archive $out/zebu-oci > "$out/zebu-$version-oci.tar"
rm -rf $stage
(cd $out && LC_ALL=C sh -c 'sha256sum ./*.*' > SHA256SUMS)
ls -l $out

#!/bin/sh
# An OCI image of one static program, made without a daemon.
#
#   sh scripts/oci.sh LAYOUT VERSION ARCHITECTURE=PROGRAM...     amd64=target/dist/…/zebu arm64=…
#
# LAYOUT is the folder of the image: an OCI image layout, with one image for each architecture. The layer has
# /usr/bin/zebu, empty folders for temporary files and, if CA_CERTIFICATES names a file, the authorities that
# are trusted. Times are SOURCE_DATE_EPOCH, so the same program gives the same bytes.
set -eu
umask 022
layout=$1 version=$2
shift 2
epoch=${SOURCE_DATE_EPOCH:?}
created=$(date -u -d "@$epoch" +%Y-%m-%dT%H:%M:%SZ)
rm -rf "$layout"
blobs=$layout/blobs/sha256
mkdir -p "$blobs"

# Moves a file to the blobs, and prints its digest.
keep() {
    digest=$(sha256sum "$1" | cut -d ' ' -f 1)
    mv "$1" "$blobs/$digest"
    echo "$digest"
}

# Prints the descriptor of a blob.
descriptor() {
    printf '{"mediaType":"%s","digest":"sha256:%s","size":%s' "$1" "$2" "$(stat -c %s "$blobs/$2")"
}

manifests=""
for pair in "$@"; do
    architecture=${pair%%=*} program=${pair#*=}
    work=$(mktemp -d)
    mkdir -p "$work/root/usr/bin" "$work/root/tmp" "$work/root/var/tmp" "$work/root/etc/ssl/certs"
    chmod 1777 "$work/root/tmp" "$work/root/var/tmp"
    install -m 755 "$program" "$work/root/usr/bin/zebu"
    if [ -n "${CA_CERTIFICATES:-}" ]; then
        install -m 644 "$CA_CERTIFICATES" "$work/root/etc/ssl/certs/ca-certificates.crt"
    fi
    tar -C "$work/root" --sort=name --mtime="@$epoch" --owner=0 --group=0 --numeric-owner --format=ustar \
        -cf "$work/layer.tar" etc tmp usr var
    diff=$(sha256sum "$work/layer.tar" | cut -d ' ' -f 1)
    gzip -9n "$work/layer.tar"
    layer=$(keep "$work/layer.tar.gz")
    cat > "$work/config" <<EOF
{"created":"$created","architecture":"$architecture","os":"linux",
"config":{"Entrypoint":["/usr/bin/zebu"],"Cmd":["--help"],"Env":["PATH=/usr/bin"],"WorkingDir":"/",
"Labels":{"org.opencontainers.image.title":"zebu","org.opencontainers.image.version":"$version",
"org.opencontainers.image.licenses":"MIT OR Apache-2.0"}},
"rootfs":{"type":"layers","diff_ids":["sha256:$diff"]},
"history":[{"created":"$created","created_by":"scripts/oci.sh"}]}
EOF
    config=$(keep "$work/config")
    cat > "$work/manifest" <<EOF
{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json",
"config":$(descriptor application/vnd.oci.image.config.v1+json "$config")},
"layers":[$(descriptor application/vnd.oci.image.layer.v1.tar+gzip "$layer")}]}
EOF
    manifest=$(keep "$work/manifest")
    rm -r "$work"
    one=$(descriptor application/vnd.oci.image.manifest.v1+json "$manifest")
    manifests="$manifests${manifests:+,
}$one,\"platform\":{\"architecture\":\"$architecture\",\"os\":\"linux\"}}"
done
cat > "$layout/index-of-images" <<EOF
{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[
$manifests]}
EOF
index=$(keep "$layout/index-of-images")
printf '{"imageLayoutVersion":"1.0.0"}' > "$layout/oci-layout"
cat > "$layout/index.json" <<EOF
{"schemaVersion":2,"manifests":[$(descriptor application/vnd.oci.image.index.v1+json "$index"),
"annotations":{"org.opencontainers.image.ref.name":"$version"}}]}
EOF

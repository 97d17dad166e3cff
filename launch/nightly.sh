#!/usr/bin/env bash
# What is too long for every change: faults, fuzzing, leaks, and a soak of `shardsum train` with random kills. Writes a
# summary, a line per part with its time and its last line, to the file given (default: nightly.md) and to the terminal.
#   launch/nightly.sh [summary.md]
# PYTHON names an interpreter with the extras "cli" and "test". SOAK: minutes of the soak (20). PARTS: which parts run
# ("faults restarts leaks fuzz soak"). The exit code is the number of parts that failed.
set -uo pipefail
cd "$(dirname "$0")/.."
summary=$(realpath -m "${1:-nightly.md}")
PYTHON=${PYTHON:-python}
export SHARDSUM_LONG_TESTS=1 OMP_NUM_THREADS=1 PYTHONPATH=$PWD
logs=$(mktemp -d)
failed=0

part() {  # name, command
    local name=$1 begin=$SECONDS verdict=passed
    shift
    [[ " ${PARTS:-faults restarts leaks fuzz soak} " == *" $name "* ]] || return 0
    echo "== $name: $*" >&2
    "$@" >"$logs/$name" 2>&1 || { verdict=FAILED; failed=$((failed + 1)); }
    local last
    last=$(grep -v '^\s*$' "$logs/$name" | tail -n 1 | cut -c 1-160)
    echo "| $name | $verdict | $((SECONDS - begin)) s | \`$*\` | $last |" | tee -a "$summary"
}

{
    echo "# Night of $(date -u +%F)"
    echo
    echo "$("$PYTHON" -c 'import torch, platform, os; print(f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores")'), commit $(git rev-parse --short HEAD)"
    echo
    echo "| part | verdict | time | command | last line |"
    echo "|---|---|---|---|---|"
} | tee "$summary"
part faults "$PYTHON" -m pytest -q tests/group tests/tools/test_checkpoint.py
part restarts "$PYTHON" -m pytest -q tests/tools/test_restarts.py
part leaks "$PYTHON" -m pytest -q tests/test_leaks.py
part fuzz "$PYTHON" -m tests.fuzz --local 100000 --processes 2000
part soak "$PYTHON" -m tests.tools.soak --minutes "${SOAK:-20}"
echo "logs: $logs" >&2
exit "$failed"

#!/usr/bin/env bash
# What is too long for every change: faults, restarts, fuzzing, leaks, training steps, CUDA code for all architectures, and
# a soak of `shardsum train` with random kills. Writes FOLDER/summary.md: versions, commit and seed, then a line per part with its time, its command
# and its last line, then the figures that the parts printed.
#
#   launch/nightly.sh [FOLDER]              # default: nightly-DATE; it is safe to start again with the same folder
#
# Every part is one command with a log of its own in FOLDER. A part that passed is not run again by a later start with the
# same folder, so a night that was cut short goes on where it stopped; another commit needs another folder. Two starts
# with other PARTS may share a folder at the same time. The exit code is 0 if all parts of this start passed, else 1.
#
# PYTHON   an interpreter with the extras "cli" and "test" (default: python)
# SEED     of the first local call and the first program of several processes (default: the day, so every night has
#          100,000 calls of its own); the soak takes it, too
# SOAK     minutes of the soak (20)
# PARTS    which parts run, of the list below
set -uo pipefail
cd "$(dirname "$0")/.."
all="faults restarts fuzz-local fuzz-processes leaks-local leaks-gather leaks-all_to_all leaks-carry leaks-groups steps cuda soak"
folder=$(realpath -m "${1:-nightly-$(date -u +%F)}")
PYTHON=${PYTHON:-python}
export SHARDSUM_LONG_TESTS=1 OMP_NUM_THREADS=1 PYTHONPATH=$PWD
mkdir -p "$folder"
commit=$(git describe --always --abbrev=12 --exclude='*' --dirty)
if [[ ! -e "$folder/commit" ]]; then
    echo "$commit" >"$folder/commit"
    echo "${SEED:-$(date -u +%Y%m%d)00000}" >"$folder/seed"
    date -u +'%F %H:%M UTC' >"$folder/started"
elif [[ $(<"$folder/commit") != "$commit" ]]; then
    echo "$folder belongs to commit $(<"$folder/commit"), not to $commit: give another folder" >&2
    exit 2
fi
seed=$(<"$folder/seed")
failed=0

summary() {  # everything known so far, replaced at once
    local new
    new=$(mktemp "$folder/summary.XXXXXX")
    {
        echo "# Night of $(<"$folder/started")"
        echo
        echo "Commit $commit, seed $seed; $("$PYTHON" -c 'import os, platform, torch
from shardsum.native import loader
native = loader.status()
print(f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores {platform.machine()},", f"{native.backend} kernels {native.cpu_isa}".strip())')."
        echo
        echo "| part | verdict | time | command | last line |"
        echo "|---|---|---|---|---|"
        for name in $all; do
            if [[ -e "$folder/$name.row" ]]; then cat "$folder/$name.row"; else echo "| $name | not run | | | |"; fi
        done
        echo
        echo "Figures that the parts printed:"
        echo
        for name in $all; do grep -hs '^figure: ' "$folder/$name.log" | sed "s/^figure: /- $name: /"; done
    } >"$new"
    chmod 644 "$new"
    mv "$new" "$folder/summary.md"
}

part() {  # name, command
    local name=$1 begin=$SECONDS verdict=passed last
    shift
    [[ " ${PARTS:-$all} " == *" $name "* ]] || return 0
    grep -qs '| passed |' "$folder/$name.row" && return 0
    echo "== $(date -u +%T) $name: $*" >&2
    "$@" >"$folder/$name.log" 2>&1 || { verdict=FAILED; failed=1; }
    last=$(grep -v '^\s*$' "$folder/$name.log" | tail -n 1 | cut -c 1-200)
    echo "| $name | $verdict | $((SECONDS - begin)) s | \`$*\` | ${last//|/\\|} |" | tee "$folder/$name.row" >&2
    summary
}

leaks=("$PYTHON" -m pytest -q -s tests/test_leaks.py -k)
part faults "$PYTHON" -m pytest -q tests/group tests/tools/test_checkpoint.py tests/tools/test_folder.py
part restarts "$PYTHON" -m pytest -q tests/tools/test_restarts.py
part fuzz-local "$PYTHON" -m tests.fuzz --seed "$seed" --local 100000 --processes 0
part fuzz-processes "$PYTHON" -m tests.fuzz --seed "$seed" --local 0 --processes 2000
part leaks-local "${leaks[@]}" "calls and local"
part leaks-gather "${leaks[@]}" "calls and gather"
part leaks-all_to_all "${leaks[@]}" "calls and all_to_all"
part leaks-carry "${leaks[@]}" "calls and carry"
part leaks-groups "${leaks[@]}" groups
part steps "${leaks[@]}" steps
if command -v nvcc >/dev/null; then part cuda "$PYTHON" .ci/cuda.py --all; fi
part soak "$PYTHON" -m tests.tools.soak --seed "$seed" --minutes "${SOAK:-20}"
summary
cat "$folder/summary.md"
exit "$failed"

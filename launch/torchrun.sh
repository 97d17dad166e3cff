#!/usr/bin/env bash
# One node: NPROC processes of `shardsum train`. Further arguments are options after the config file.
#   NPROC=4 CONFIG=configs/multi_process.yaml launch/torchrun.sh --train.steps 50
set -euo pipefail
cd "$(dirname "$0")/.."

NPROC=${NPROC:-4}                             # processes; at most the virtual ranks of CONFIG
CONFIG=${CONFIG:-configs/multi_process.yaml}
FOLDER=${FOLDER:-}                            # a folder that holds a checkpoint goes on; default: a new one in runs/
RESTARTS=${RESTARTS:-3}                       # how often a run whose process died goes on from its checkpoint
DEVICE=${DEVICE:-cpu}                         # cuda: one GPU for every process
PYTHON=${PYTHON:-python}

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node="$NPROC" --max-restarts="$RESTARTS" \
  -m shardsum train --config "$CONFIG" ${FOLDER:+--folder "$FOLDER"} --device "$DEVICE" "$@"

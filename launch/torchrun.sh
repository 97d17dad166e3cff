#!/usr/bin/env bash
# One node: NPROC processes of `shardsum train`. Further arguments are options after the config file.
#   NPROC=4 CONFIG=configs/multi_process.yaml launch/torchrun.sh --train.steps 50
set -euo pipefail
cd "$(dirname "$0")/.."

NPROC=${NPROC:-4}                             # processes; at most the virtual ranks of CONFIG
CONFIG=${CONFIG:-configs/multi_process.yaml}
FOLDER=${FOLDER:-runs/$(date +%Y%m%d-%H%M%S)}       # an existing one goes on with FOLDER=... launch/torchrun.sh --resume
DEVICE=${DEVICE:-cpu}                         # cuda: one GPU for every process
PYTHON=${PYTHON:-python}

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node="$NPROC" \
  -m shardsum train --config "$CONFIG" --folder "$FOLDER" --device "$DEVICE" "$@"

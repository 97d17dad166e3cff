#!/usr/bin/env bash
# Two nodes without a scheduler: run this on each of them, with the same HEAD (a name or address of the first node).
#   node 0:  HEAD=node-a NODE=0 launch/two_nodes.sh --group.num_virtual_ranks 16
#   node 1:  HEAD=node-a NODE=1 launch/two_nodes.sh --group.num_virtual_ranks 16
# Each host is a domain of its own: sums that are large enough cross the network once, as accumulators. COSTS names a
# cost file that both nodes can read. Where it is missing it is measured first: it says what the network can do.
set -euo pipefail
cd "$(dirname "$0")/.."

HEAD=${HEAD:?the first node: HEAD=name NODE=0 or 1 launch/two_nodes.sh}
NODE=${NODE:?this node: 0 or 1}
NODES=${NODES:-2}
NPROC=${NPROC:-8}                             # processes on a node
CONFIG=${CONFIG:-configs/multi_process.yaml}
FOLDER=${FOLDER:-runs/two-nodes}              # a folder that both nodes see
DEVICE=${DEVICE:-cuda}
COSTS=${COSTS:-$FOLDER/costs.json}
PYTHON=${PYTHON:-python}

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
launch() { # PORT MODULE_ARGS
  "$PYTHON" -m torch.distributed.run --nnodes="$NODES" --node-rank="$NODE" --nproc-per-node="$NPROC" \
    --master-addr="$HEAD" --master-port="$1" -m shardsum "${@:2}"
}
mkdir -p "$(dirname "$COSTS")"
[ -e "$COSTS" ] || launch 29501 bench --calibrate "$COSTS" --device "$DEVICE"
launch 29500 train --config "$CONFIG" --folder "$FOLDER" --device "$DEVICE" --group.costs "$COSTS" "$@"

#!/usr/bin/env bash
# Two emulated hosts on one machine: network namespaces that one rate-limited link joins, two processes on each.
# Needs root and iproute2 (apt-get install iproute2); touches no other network. From the repository's root:
#
#   RATE=1gbit benchmarks/two_hosts.sh benchmarks/two_hosts.py --json benchmarks/results/two_hosts_1gbit.json
#
# RATE: in tc's words (200mbit, 1gbit, 10gbit), each way; the link lets a millisecond's worth pass at once.
# NPROC: processes on each host. PYTHON: the interpreter.
# The program finds the name of its end of the link in $LINK.
set -euo pipefail
RATE=${RATE:-1gbit}
NPROC=${NPROC:-2}
PYTHON=${PYTHON:-python}
[ "$(id -u)" = 0 ] || { echo "two_hosts.sh: needs root, to make network namespaces" >&2; exit 2; }
command -v ip >/dev/null && command -v tc >/dev/null || { echo "two_hosts.sh: needs iproute2 (ip, tc)" >&2; exit 2; }

case $RATE in
  *gbit) burst=$((${RATE%gbit} * 125000)) ;;
  *mbit) burst=$((${RATE%mbit} * 125)) ;;
  *) echo "two_hosts.sh: RATE is a whole number of mbit or gbit" >&2; exit 2 ;;
esac
[ "$burst" -ge 70000 ] || burst=70000  # a packet of the kernel's, before it is cut
namespaces=("shardsum-$$-a" "shardsum-$$-b")
devices=("sa$$" "sb$$")
cleanup() { for n in "${namespaces[@]}"; do ip netns del "$n" 2>/dev/null || true; done; }
trap cleanup EXIT
for n in "${namespaces[@]}"; do ip netns add "$n"; done
ip link add "${devices[0]}" type veth peer name "${devices[1]}"
for i in 0 1; do
  n=${namespaces[$i]} d=${devices[$i]}
  ip link set "$d" netns "$n"
  ip netns exec "$n" ip addr add "10.77.0.$((i + 1))/24" dev "$d"
  ip netns exec "$n" ip link set "$d" up
  ip netns exec "$n" ip link set lo up
  ip netns exec "$n" tc qdisc add dev "$d" root tbf rate "$RATE" burst "$burst" latency 100ms
done

start() { # HOST PROGRAM ARGS: the launcher of one host
  local n=${namespaces[$1]} d=${devices[$1]}
  ip netns exec "$n" env OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME="$d" TP_SOCKET_IFNAME="$d" LINK="$d" RATE="$RATE" \
    TWO_HOSTS="$1" "$PYTHON" -m torch.distributed.run --nnodes=2 --node-rank="$1" --nproc-per-node="$NPROC" \
    --master-addr=10.77.0.1 --master-port=29511 "${@:2}"
}
start 1 "$@" & other=$!
start 0 "$@"
wait $other

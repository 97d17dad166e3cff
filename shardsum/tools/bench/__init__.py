"""``shardsum bench``: rows of bytes, time, rate, share of the ceiling and speed-up over a named baseline, all verified.

    shardsum bench --quick                                               seconds, small sizes
    shardsum bench --json benchmarks/results/cpu.json                    local sums on the CPU
    shardsum bench --device cuda --json gpu.json                         ... on a GPU
    torchrun --nproc-per-node=4 -m shardsum bench --json gloo.json       collectives between processes
    torchrun --nproc-per-node=4 -m shardsum bench --calibrate costs.json constants of transport="auto"
    shardsum bench --plot gpu.json                                       pictures of a file

Exit code 1: a result of ours differs from the reference in a bit, or a baseline is off by more than its rounding.
"""

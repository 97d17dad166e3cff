"""Draw the rows of a peer_bench.py result: time over size, and the busiest link's rate beside the load rate.

python benchmarks/peer_plot.py benchmarks/results/peer_h200x2.json [picture.png]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main(source: Path, picture: Path) -> None:
    facts = json.loads(source.read_text())
    rows = [row for row in facts["rows"] if row["profile"] == "1.0"]
    figure, (times, rates) = plt.subplots(1, 2, figsize=(12, 5))
    for variant in dict.fromkeys(row["variant"] for row in rows):
        points = sorted((row["bytes"], row["us"], row["gbps"]) for row in rows if row["variant"] == variant)
        style = "-" if variant.startswith("peer") else "--"
        times.plot([p[0] for p in points], [p[1] for p in points], style, marker=".", label=variant)
        rates.plot([p[0] for p in points], [p[2] for p in points], style, marker=".", label=variant)
    rates.axhline(facts["load_rate_gbps"], color="grey", linewidth=0.8)
    times.set(xscale="log", yscale="log", xlabel="bytes of a shard", ylabel="us per call (CUDA graph)")
    rates.set(xscale="log", xlabel="bytes of a shard", ylabel="GB/s of the busiest link; grey: rate of loads")
    times.legend(fontsize=7)
    figure.suptitle(f"all_reduce, {facts['gpus']} x {facts['gpu']}, torch {facts['torch']}, {facts['date']}")
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    main(path, Path(sys.argv[2]) if len(sys.argv) > 2 else path.with_suffix(".png"))

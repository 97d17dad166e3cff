"""``shardsum compare --runs A B``: where two runs of ``shardsum train`` first differ.

Traces (``shardsum train --trace``) tell the first step and tensor. The element is told where the values of that step
are there: in the checkpoint and trace.safetensors of a run that ends at it; else the commands that make such runs are
printed. Runs without traces are compared at their ends.
"""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from torch import Tensor

from ..core import bits
from .train import checkpoint
from .train.folder import read_file
from .train.trace import VALUES, read_trace

_MOST_NAMED = 6  # tensors of the first step that differs


def compare_runs(a: str, b: str) -> int:
    """Print where two run folders differ; 0 when they hold the same bits.

    Raises:
        ValueError: a folder holds no checkpoint, or a file is damaged.
        OSError: a file cannot be read.
    """
    folders = Path(a), Path(b)
    first, second = (_checkpoint(folder) for folder in folders)
    traces_agree = _compare_traces(folders, (first, second))
    steps = first["losses"].shape[0], second["losses"].shape[0]
    if steps[0] != steps[1]:
        print(f"{a} has {steps[0]} steps, {b} has {steps[1]}")
    common = min(steps)
    losses = [{"losses": tensors.pop("losses")[:common]} for tensors in (first, second)]
    difference = bits.first_difference(*losses)
    print(f"losses of {common} steps: {difference or 'the same bits'}")
    if steps[0] != steps[1]:
        return 1
    later = bits.first_difference(first, second)
    print(f"{len(first)} tensors at the end: {later or 'the same bits'}")
    return int(difference is not None or later is not None or not traces_agree)


def _checkpoint(folder: Path) -> dict[str, Tensor]:
    try:
        return checkpoint.read(folder / checkpoint.NAME).tensors
    except FileNotFoundError:
        raise ValueError(f"runs: {folder} holds no {checkpoint.NAME}") from None


def _compare_traces(folders: tuple[Path, Path], ends: tuple[dict[str, Tensor], dict[str, Tensor]]) -> bool:
    """Print the first step, tensors and element that differ, as far as the traces tell; True when nothing does."""
    first, second = (read_trace(folder) for folder in folders)
    common = sorted(first.keys() & second.keys())
    if not common:
        missing = [str(folder) for folder, trace in zip(folders, (first, second)) if not trace]
        print(f"steps are not compared: no trace (--trace) in {', '.join(missing)}" if missing else "no common steps")
        return True
    step = next((step for step in common if first[step] != second[step]), None)
    if step is None:
        print(f"traces of {len(common)} steps: the same bits")
        return True
    names = [n for n in {**first[step], **second[step]} if first[step].get(n) != second[step].get(n)]
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    print(f"first difference: step {step}, in {', '.join(names[:_MOST_NAMED])}{more}")
    if any(tensors["losses"].shape[0] != step for tensors in ends):
        print("to see the elements, end both runs at that step and compare those:")
        ends_there = [f"{folder}-step{step}" for folder in folders]
        for folder, ended in zip(folders, ends_there):
            print(f"  shardsum train --config {folder}/config.yaml --folder {ended} --train.steps {step} --trace")
        print(f"  shardsum compare --runs {' '.join(ends_there)}")
        return False
    values = [_values(folder, tensors, step) for folder, tensors in zip(folders, ends)]
    known = [name for name in names if all(name in tensors for tensors in values)]
    for name in known[:_MOST_NAMED]:
        print(f"  {bits.first_difference(*({name: tensors[name]} for tensors in values))}")
    return False


def _values(folder: Path, end: dict[str, Tensor], step: int) -> dict[str, Tensor]:
    """Tensors of a run that ends at ``step``, by the names of its trace."""
    values = {**end, "loss": end["losses"][step - 1]}
    try:
        values |= parse_tensors(read_file(folder / VALUES))
    except FileNotFoundError:
        pass
    except SafetensorError as error:
        raise ValueError(f"{folder / VALUES} is damaged: {error}") from None
    return values

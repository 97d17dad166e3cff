"""The words that public arguments take, as types: a type checker refuses ``op="avg"`` before anything runs."""

from __future__ import annotations

from typing import Literal

#: How contributions to a position become one row.
Op = Literal["sum", "mean"]

#: What autograd does with a result that every process gets.
Grad = Literal["identity", "sum"]

#: How virtual ranks are dealt out to processes, where no list of owners says it.
Placement = Literal["contiguous", "zigzag"]

#: What moves rows between processes.
TransportName = Literal["auto", "local", "gather", "all_to_all", "carry", "peer"]

#: How often processes compare their arguments.
Check = Literal["first", "always"]

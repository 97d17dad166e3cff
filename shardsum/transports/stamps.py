"""What an exchange is: the same on every process that takes part in it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple


class Stamp(NamedTuple):
    """What an exchange is, on every process that takes part: a hash of 63 bits, and a text for errors."""

    hash: int
    text: str

    def of(self, call: int) -> Stamp:
        """This stamp for an exchange of the backward pass of ``call``; itself where that is 0."""
        if not call:
            return self
        return Stamp(self.hash + call * 0x9FB21C651E98DF25 & (1 << 63) - 1, f"{self.text} of call {call}")


class Step(NamedTuple):
    """One exchange of a wire: its number there, what it is, and the number of the call that it belongs to."""

    number: int
    stamp: Stamp
    call: int

    def __str__(self) -> str:
        return f"{self.stamp.text} (call {self.call})"


#: A :class:`Step` as a plain tuple, which is made in less time.
Begun = tuple[int, Stamp, int]


def stamp(name: str, signature: Mapping[str, Any]) -> Stamp:
    """The stamp of an exchange.

    Args:
        name: the collective, as in ``"backward of all_gather"``.
        signature: all that determines the sizes of its transfers and what is done with them: JSON values, or such as
            print alike on all processes. Errors show its fields.
    """
    said = json.dumps([name, signature], sort_keys=True, default=str)
    number = int.from_bytes(hashlib.blake2b(said.encode(), digest_size=8).digest(), "little") >> 1
    fields = ", ".join(f"{key}={value}" for key, value in signature.items())
    return Stamp(number, f"{name}({fields if len(fields) <= 200 else fields[:197] + '...'})")

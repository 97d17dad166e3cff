"""How shards reach the processes that sum them. Each module holds one transport; :mod:`.base` says what one is.

To add a transport, write such a module and name its class in :data:`TRANSPORTS`: a group
(:mod:`shardsum.group.exchanges`) sums or copies the rows it yields with the same kernel as all others. Peer memory
(:mod:`.peer`) and carried accumulators (:mod:`.carry`) yield no rows, since they sum while they move: they stand apart.

    local       views of the shards in place                                  one process
    gather      a buffer of all processes' shards by all_gather               small, or nearly even shards
    all_to_all  exactly what each process wants, in uneven splits             large or ragged
    carry       accumulators from domain to domain (:mod:`.carry`)            several hosts, or ranks a process
"""

from __future__ import annotations

from .all_to_all import AllToAll
from .base import Rows, Transport
from .gather import Gather
from .stamps import Stamp, stamp
from .tagged import TaggedWire
from .wire import Wire

TRANSPORTS: dict[str, type[Transport]] = {"local": AllToAll, "gather": Gather, "all_to_all": AllToAll}

__all__ = ["TRANSPORTS", "Rows", "Stamp", "TaggedWire", "Transport", "Wire", "stamp"]

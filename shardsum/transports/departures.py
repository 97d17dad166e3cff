"""Exit waits for the threads of a process group to let go of the tensors they have moved.

A thread of gloo drops a transfer's tensors a moment after the transfer is done. Where it holds the last reference to a
tensor that Python knows, it needs the GIL for that. At exit it does not get the GIL but is ended inside C++ code that
must not be unwound, and the process aborts although its work is done. So the tensors of transfers are noted here, and
exit waits until they are gone. (A tensor that C++ still holds keeps its Python object, and so weak references to it,
alive.)
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections import deque

from torch import Tensor

LIMIT = 2.0  # seconds; a transfer that never ends must not keep the process
_moved: deque[weakref.ref[Tensor]] = deque(maxlen=64)  # of the last transfers; older ones are long done


def note(*tensors: Tensor) -> None:
    """Remember tensors that a thread of the process group moves, and that may be freed by it."""
    _moved.extend(map(weakref.ref, tensors))


@atexit.register
def wait() -> None:
    """Return once all noted tensors are gone, or after ``LIMIT``."""
    deadline = time.monotonic() + LIMIT
    while any(x() is not None for x in _moved) and time.monotonic() < deadline:
        time.sleep(0.001)  # without the interpreter's lock

"""Short private arrays that are used once: through arrays that calls of their kind are bound to.

To bind a call takes 50 µs, and 150 for 1 MiB in pieces; to copy 4 KiB takes one.  So at its second
call a kind is bound to arrays of ours, and all calls of that kind go through these, for example
``comm.allreduce(loss)`` of a new number each time.  A call that is made again with the same arrays
is bound to them (see :mod:`.quick`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from .binding import held_bytes
from .call import Call
from .kept import Kept
from .operations import Op
from .prepared import Prepared
from .quick_runs import kernel_run
from .service import Service
from .symmetric import STAGED, staged

_MOST_BYTES = 1 << 20  # at 2 MiB binding and copying take as long as each other
_KEPT_BYTES = 16 << 20


@dataclass
class _Kind:
    """What all calls of a kind go through."""

    x: np.ndarray | None
    out: np.ndarray | None
    op: Op | None  # by its identity it is found
    run: Callable[[], None]
    nbytes: int
    used: int = 0


class ShortCalls:
    """The kinds of short calls of one communicator."""

    def __init__(self, service: Service):
        self._service = service
        self._kinds: Kept[_Kind] = Kept(_KEPT_BYTES)

    def serve(self, prepared: Prepared, algorithm: str) -> bool:
        """Serve a call, if it is short and goes through the slots; tell whether it was."""
        call, service = prepared.call, self._service
        heap = service.shared.heap
        if call.nbytes > _MOST_BYTES or heap is None or not heap.has_staging:
            return False
        if call.collective == "barrier" or not (call.op is None or call.op.builtin):
            return False
        way = service.chooser.way(call, algorithm, service.shared.place(call))
        if way.name != STAGED:
            return False
        service.check_usable()
        kind = self._kind(call)
        if kind is None:
            return False
        if kind.x is not None:
            kind.x[...] = call.x
        kind.run()
        in_place = call.in_place and call.collective == "broadcast"  # the root's may be read-only
        if call.out is not None and not (in_place and call.rank == call.root):
            call.out[...] = kind.out
        return True

    def clear(self) -> None:
        """Forget every kind."""
        self._kinds.clear()

    def _kind(self, call: Call) -> _Kind | None:
        """Give the kind of a call, if it is seen not for the first time: many have no second."""
        sizes = tuple(None if data is None else data.size for data in (call.x, call.out))
        key = (call.collective, call.dtype, call.root, id(call.op), call.counts, *sizes)
        kinds, now = self._kinds, self._service.sequence
        kind = kinds.entries.get(key)
        if kind is None:
            since = kinds.last_use(key, now)
            own = sum(data.nbytes for data in (call.x, call.out) if data is not None)
            if since is None or not kinds.make_room(since, own):
                return None
            kind = self._made(call)
            kinds.keep(key, kind)
        kind.used = now
        return kind

    def _made(self, call: Call) -> _Kind:
        """Bind a call like this one to arrays of ours; a broadcast to one, else to two."""
        service = self._service
        out = None if call.out is None else np.empty(call.out.size, call.dtype)
        x = None if call.x is None else np.empty(call.x.size, call.dtype)
        if call.collective == "broadcast":
            x = out if call.rank == call.root else None
        ours = replace(call, x=x, out=out, in_place=call.collective == "broadcast")
        heap = service.shared.heap
        assert heap is not None
        kernels = [staged.kernel(ours, heap, slot) for slot in range(2)]
        what = service.chooser.describe(ours, service.chooser.way(ours, STAGED), None)
        nbytes = sum(data.nbytes for data in (x, out) if data is not None)
        nbytes += sum(held_bytes(kernel) for kernel in kernels)
        run = kernel_run(service, what, STAGED, kernels, tuple)
        return _Kind(x, out, call.op, run, nbytes)

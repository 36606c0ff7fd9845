"""The path of an MPI library that takes addresses on a GPU: only what moves data, never sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..call import Call
from ..device.array import DeviceArray
from ..device.base import Device
from ..kept import Kept
from ..prepare_device import apart

_LIMIT = 16 << 20  # bytes held by bound calls


@dataclass
class _Bound:
    """A call of the library, bound to addresses."""

    call: Callable[[], Any]
    used: int
    nbytes: int = 4 << 10


class Direct:
    """Data movement by the library's own collectives, on addresses of the device.

    The library knows nothing of streams: the host waits for what the arrays' streams have queued,
    once, before the call.  Calls are bound to addresses and kept.

    Parameters
    ----------
    device : Device
        Where the arrays are.
    bind : callable
        Makes the library's call, see :class:`~mpidist.backends.native.NativeCollectives`.
    """

    def __init__(self, device: Device, bind: Callable[[Call], Callable[[], Any]]):
        self.device, self._bind = device, bind
        self._kept: Kept[_Bound] = Kept(_LIMIT)
        self._calls = 0

    def serve(self, call: Call, meet: Callable[[Callable[[], Any]], Any]) -> None:
        """Serve a call; ``meet(act)`` has the ranks meet, and then does something."""
        arrays = [data for data in (call.x, call.out) if data is not None]
        for data in arrays:
            self.device.synchronize(data.stream)
        if call.collective == "broadcast" and call.x is not None and not call.in_place:
            self._copy(call.out, call.x)  # MPI broadcasts in place
        stream = arrays[0].stream
        separate = apart(call, stream)
        if separate is not call:
            self.device.synchronize(stream)
        meet(self._call(separate))

    def _copy(self, target: Any, source: DeviceArray) -> None:
        self.device.copy(target.pointer, source.pointer, source.nbytes, target.stream)
        self.device.synchronize(target.stream)

    def _call(self, call: Call) -> Callable[[], Any]:
        """Give the library's call for these addresses, made before if possible."""
        key = (
            call.collective,
            call.root,
            call.dtype,
            call.counts,
            call.out_counts,
            call.in_place,
            *((None if a is None else (a.pointer, a.size)) for a in (call.x, call.out)),
        )
        self._calls += 1
        known = self._kept.entries.get(key)
        if known is None:
            if call.collective == "broadcast":
                call = replace(call, x=None)  # it is in `out` by now
            known = _Bound(self._bind(call), self._calls)
            if self._kept.admits(key, self._calls):
                self._kept.keep(key, known)
        known.used = self._calls
        return known.call

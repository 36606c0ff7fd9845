"""The path of an MPI library that takes addresses on a GPU: only what moves data, never sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..call import Call
from ..device.array import DeviceArray
from ..device.base import Device
from ..kept import Kept
from ..prepare_device import apart
from .executor import LIBRARIES, GpuExecutor, GpuProgram

if TYPE_CHECKING:
    from ..backends.native import NativeCollectives

_LIMIT = 16 << 20  # bytes held by bound calls


@dataclass
class _Bound:
    """A call of the library, bound to addresses."""

    call: Callable[[], Any]
    used: int
    nbytes: int = 4 << 10


class Direct(GpuExecutor):
    """Data movement by the library's own collectives, on addresses of the device.

    The library knows nothing of streams: the host waits for what the arrays' streams have queued,
    once, before the call.  Calls are bound to addresses and kept.

    Parameters
    ----------
    device : Device
        Where the arrays are.
    native : NativeCollectives
        The library's calls.
    taken : dict
        The path of each collective of arrays in private memory.
    """

    name = "mpi"

    def __init__(self, device: Device, native: NativeCollectives, taken: dict[str, str]):
        self.device, self._native, self._taken = device, native, taken
        self._kept: Kept[_Bound] = Kept(_LIMIT)
        self._calls = 0

    def takes(self, call: Call, algorithm: str, background: bool) -> bool:
        """Return whether it was agreed on; non-blocking collectives do not take addresses."""
        return (
            not background and algorithm in LIBRARIES and self._taken[call.collective] == self.name
        )

    def why_not(self, call: Call) -> str | None:
        """Return what the library cannot do."""
        return self._native.why_not(call)

    def agreed(self, call: Call, algorithm: str) -> str:
        """Tell it from a call of host memory."""
        return "on a GPU"

    def bind(self, call: Call, algorithm: str) -> GpuProgram:
        """Return the library's call, once its arrays hold what their streams have queued."""
        arrays = [data for data in (call.x, call.out) if data is not None]
        for data in arrays:
            self.device.synchronize(data.stream)
        if call.collective == "broadcast" and call.x is not None and not call.in_place:
            self._copy(call.out, call.x)  # MPI broadcasts in place
        stream = arrays[0].stream
        separate = apart(call, stream)
        if separate is not call:
            self.device.synchronize(stream)
        run = self._call(separate)
        return GpuProgram(lambda: (run(), separate))  # whose input, if copied, lives until then

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
            known = _Bound(self._native.bind(call), self._calls)
            if self._kept.admits(key, self._calls):
                self._kept.keep(key, known)
        known.used = self._calls
        return known.call

"""CUDA-aware MPI: an executor for it, and detection of whether the MPI library supports it.

A CUDA-aware library accepts addresses of GPU memory.  The library is queried, never tried: one
that is not CUDA-aware would crash the process.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..backends.executor import ONCE, Use
from ..backends.program import Program, library_call
from ..calls.call import Call
from ..calls.prepare import with_copied_input
from ..device.array import DeviceArray
from ..device.base import Device
from ..engine.programs import Bound
from ..engine.service import Service
from ..schedule.registry import Choice
from ..selection.config import switch
from ..selection.names import MPI
from .executor import GpuExecutor


class CudaAwareMpi(GpuExecutor):
    """Executor of collectives without a reduction, by the MPI library's calls on GPU addresses.

    The library does not use streams: before the call, the host waits for the work queued on the
    arrays' streams.
    """

    name, summary = MPI, "the MPI library's own collective, on GPU addresses"

    def __init__(self, unavailable: str | None, device: Device, service: Service):
        super().__init__(unavailable)
        self.device, self._service, self._native = device, service, service.backend.native

    def why_not(self, call: Call, algorithm: Choice | str, background: bool) -> str | None:
        """Return why the library cannot serve the call."""
        if self.unavailable is not None:
            return self.unavailable
        if call.op is not None:
            return "MPI libraries combine arrays on the host: reductions are staged"
        if background:
            return "MPI libraries take no GPU addresses in non-blocking collectives"
        assert self._native is not None
        return self._native.why_not(call)

    def agreed(self, call: Call, choice: Choice | None) -> str:
        """Return "on a GPU", so that a host call on another rank is a mismatch."""
        return "on a GPU"

    def bind(self, call: Call, choice: Choice | None, use: Use = ONCE) -> Program:
        """Wait for work queued on the arrays' streams; return the program of the library's call."""
        arrays = [data for data in (call.x, call.out) if data is not None]
        for data in arrays:
            self.device.synchronize(data.stream)
        if call.collective == "broadcast" and call.x is not None and not call.in_place:
            self._copy(call.out, call.x)  # MPI broadcasts in place
            call = replace(call, x=None)
        stream = arrays[0].stream
        separate = with_copied_input(call, stream)
        if separate is call:
            return self._bound(call, arrays)
        self.device.synchronize(stream)
        # The program keeps the copy of the input alive until the call has been made.
        return library_call(*self._actions(separate), partial(id, separate))

    def _copy(self, target: Any, source: DeviceArray) -> None:
        self.device.copy(target.pointer, source.pointer, source.nbytes, target.stream)
        self.device.synchronize(target.stream)

    def _bound(self, call: Call, arrays: list[DeviceArray]) -> Program:
        """Return the program of the library's call, from the cache if the addresses are the same.

        When one of the call's `arrays` is deleted, the cache drops the program.
        """
        key = (
            *(self.name, call.collective, call.root, call.dtype, call.counts, call.out_counts),
            call.in_place,
            *((None if a is None else (a.pointer, a.size)) for a in (call.x, call.out)),
        )
        bound = self._service.programs.get_or_bind(key, call, self._bind, owners=_owners_of)
        return self._bind(call).program if bound is None else bound.program

    def _bind(self, call: Call) -> Bound:
        return Bound([library_call(*self._actions(call))])

    def _actions(self, call: Call) -> list[Callable[[], Any]]:
        assert self._native is not None
        return self._native.actions(call)


def _owners_of(call: Call) -> list[Any]:
    return [array.owner for array in (call.x, call.out) if isinstance(array, DeviceArray)]


VARIABLE = "MPIDIST_GPU_AWARE"
YES, NO, UNKNOWN = "yes", "no", "unknown"
_SWITCHES = {"Intel MPI": "I_MPI_OFFLOAD", "Cray MPICH": "MPICH_GPU_SUPPORT_ENABLED"}
_CUDA = 0  # MPIX_GPU_SUPPORT_CUDA

Find = Callable[[str], Any]


@dataclass(frozen=True)
class Awareness:
    """Whether the MPI library is CUDA-aware ("yes", "no" or "unknown"), and the reason."""

    answer: str
    why: str


@dataclass(frozen=True)
class MpiLibrary:
    """Properties of the loaded MPI library: `vendor` is mpi4py's name of it, such as "Open MPI".

    `kinds` are the supported memory kinds, ``mpi_memory_alloc_kinds`` of ``COMM_WORLD``;
    ``find(name)`` returns a C function of the library, or None if the library lacks it.
    """

    vendor: str
    version: tuple[int, ...]
    kinds: str
    find: Find


def loaded_library() -> MpiLibrary:
    """Return the properties of the library that mpi4py runs on; MPI must have been started."""
    from mpi4py import MPI

    vendor, version = MPI.get_vendor()
    info = MPI.COMM_WORLD.Get_info()
    kinds = info.get("mpi_memory_alloc_kinds") or ""
    info.Free()
    if "CRAY" in MPI.Get_library_version().upper():
        vendor = "Cray MPICH"
    return MpiLibrary(vendor, version, kinds, _find)


def detect(library: MpiLibrary, environ: Mapping[str, str] = os.environ) -> Awareness:
    """Return whether an MPI library is CUDA-aware, and why.

    The first source with an answer decides: ``MPIDIST_GPU_AWARE``; the memory kinds of MPI 4.1;
    the environment variable without which Intel's and Cray's libraries reject GPU addresses;
    ``MPIX_GPU_query_support``; ``MPIX_Query_cuda_support``.
    """
    aware = switch(VARIABLE, environ)
    if aware is not None:
        return Awareness(YES if aware else NO, f"{VARIABLE}={aware:d}")
    name = f"{library.vendor} {'.'.join(map(str, library.version))}"
    if any(kind.strip().startswith("cuda") for kind in library.kinds.split(",")):
        return Awareness(YES, f"{name}: mpi_memory_alloc_kinds has cuda ({library.kinds})")
    needed = _SWITCHES.get(library.vendor)
    if needed is not None and environ.get(needed, "0") in ("", "0"):
        return Awareness(NO, f"{name} takes GPU addresses only with {needed}=1")
    return _query(library, name)


def _query(library: MpiLibrary, name: str) -> Awareness:
    query = library.find("MPIX_GPU_query_support")
    if query is not None:
        supported = ctypes.c_int(0)
        if query(ctypes.c_int(_CUDA), ctypes.byref(supported)) == 0:
            return _answer(bool(supported.value), f"{name}: MPIX_GPU_query_support")
    if library.vendor.endswith("MPICH") and library.version < (4,):
        return Awareness(UNKNOWN, f"{name} has no query for CUDA support that is safe to ask")
    query = library.find("MPIX_Query_cuda_support")
    if query is not None:
        return _answer(bool(query()), f"{name}: MPIX_Query_cuda_support")
    return Awareness(UNKNOWN, f"{name} has no query for CUDA support; {VARIABLE}=1 declares it")


def _answer(supported: bool, who: str) -> Awareness:
    if supported:
        return Awareness(YES, f"{who} reports CUDA support")
    return Awareness(NO, f"{who} reports no CUDA support")


def _find(name: str) -> Any:
    """Return the C function `name` of the loaded MPI libraries, or None if none has it."""
    for path in _loaded_files():
        try:
            return getattr(ctypes.CDLL(path), name)
        except (OSError, AttributeError):
            continue
    return None


def _loaded_files() -> list[str]:
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
            paths = {line.split(maxsplit=5)[5].strip() for line in lines if ".so" in line}
    except (OSError, IndexError):
        return []
    return sorted(p for p in paths if "libmpi" in os.path.basename(p))

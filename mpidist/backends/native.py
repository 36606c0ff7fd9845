"""The MPI library's own collectives, bound to flat numpy arrays."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

import numpy as np
from mpi4py import MPI

from ..calls.arrays import address
from ..calls.call import Call
from ..device.array import DeviceArray
from ..operations import (
    ANY,
    OPS,
    Op,
    accumulator,
    divides_first,
    division,
    extreme_values,
    is_mean,
    narrow,
    widen,
)
from ..schedule.contract import COLLECTIVES
from .program import Action

Actions = list[Action]
_MPI_OPS = {
    "sum": MPI.SUM,
    "mean": MPI.SUM,
    "prod": MPI.PROD,
    "max": MPI.MAX,
    "min": MPI.MIN,
    "and": MPI.BAND,
    "or": MPI.BOR,
    "xor": MPI.BXOR,
}
_LOGICAL = {"and": MPI.LAND, "or": MPI.LOR, "xor": MPI.LXOR, "max": MPI.LOR, "min": MPI.LAND}


def mpi_datatype(dtype: np.dtype) -> MPI.Datatype | None:
    """Return MPI's type for a numpy dtype, or None where MPI has none."""
    if dtype.kind not in "biufc" or not dtype.isnative or dtype.itemsize == 2 and dtype.kind == "f":
        return None
    try:
        return MPI.Datatype.fromcode(dtype.char)
    except (ValueError, KeyError):
        return None


_COUNT_LIMIT = 2**31 - 1


def _standard() -> str:
    return ".".join(map(str, MPI.Get_version()))


def _calling(op: Op, call: Callable[[], Any]) -> None:
    """Run a bound call; the unused argument `op` keeps alive the user's function for MPI."""
    call()


class _Request:
    """One non-blocking collective of the library, as a :class:`~mpidist.backends.base.Transfer`."""

    __slots__ = ("_method", "_arguments", "_op", "_request")

    def __init__(self, method: Callable[..., MPI.Request], arguments: list, op: Op | None):
        self._method, self._arguments = method, arguments
        self._op = op  # the library knows a function by its address only
        self._request = MPI.REQUEST_NULL

    def start(self) -> None:
        """Start the call."""
        self._request = self._method(*self._arguments)

    def test(self) -> bool:
        """Return whether the call has ended."""
        return self._request.Test()


@lru_cache(maxsize=256)
def _library_operation(name: str, dtype: np.dtype) -> tuple[MPI.Op, MPI.Datatype] | None:
    """Return MPI's operation and type, or None if MPI has none with numpy's arithmetic."""
    datatype = mpi_datatype(dtype)
    if datatype is None:
        return None
    operation = (_LOGICAL if dtype.kind == "b" else _MPI_OPS)[name]
    return (operation, datatype) if _agrees(operation, datatype, OPS[name], dtype) else None


def _agrees(operation: MPI.Op, datatype: MPI.Datatype, op: Op, dtype: np.dtype) -> bool:
    """Return whether the library combines every pair of extreme values as numpy does.

    A list kept by hand missed cases: sums of 8 and 16 bits saturate in Open MPI, "max" and "min"
    drop NaN, a complex product with an infinite factor is infinite; Open MPI 4.1.4 compares uint64,
    and MPICH 4.0.2 all unsigned integers, as if they were signed.  The trial takes about 1 ms, of
    complex numbers 10 ms, once in a process.
    """
    values = extreme_values(dtype)
    left, right = np.repeat(values, values.size), np.tile(values, values.size)
    expected = np.empty_like(right)
    with np.errstate(all="ignore"):
        op.combine(left, right, expected)
    for count in (1, 3, left.size):  # libraries have other code for the end of a vector
        got = right.copy()
        for at in range(0, left.size, count):
            parts = (data[at : at + count] for data in (left, got))
            try:
                operation.Reduce_local(*([_memory(part), part.size, datatype] for part in parts))
            except MPI.Exception:  # not every library has every operation of every type
                return False
        if not np.array_equal(got, expected, equal_nan=dtype.kind in "fc"):
            return False
    return True


def _memory(data: np.ndarray) -> MPI.buffer:
    return MPI.buffer.fromaddress(address(data), data.nbytes)


@lru_cache(maxsize=1)
def _crashes_in_place() -> bool:
    """Return whether a reduce in place to another root than 0 is a SIGSEGV, as in some MPICH.

    In 3.4.3 and 4.0 (github.com/pmodels/mpich/issues/6540); 4.1.3 is right.
    """
    vendor, version = MPI.get_vendor()
    return vendor == "MPICH" and version < (4, 1, 3)


@lru_cache(maxsize=256)
def _needs_arithmetic(name: str, dtype: np.dtype) -> bool:
    """Return whether operation `name` on `dtype` needs arithmetic around the library's call.

    That is the division of a mean, or the conversion to a wider dtype and back.
    """
    op = OPS[name]
    return is_mean(op) or accumulator(op, dtype) != dtype


class NativeCollectives:
    """The MPI library's collectives on one communicator, as calls bound to arrays' addresses."""

    def __init__(self, comm: MPI.Comm):
        self.comm = comm
        self._elements: dict[np.dtype, MPI.Datatype] = {}
        self._made: dict[tuple[int, np.dtype], MPI.Datatype] = {}  # by the function's owner

    def why_not(self, call: Call) -> str | None:
        """Return why the library cannot serve a call, or None if it can."""
        if call.op is not None and call.op.grouping != ANY:
            return f"MPI has no op {call.op.label}"
        # The ranks must answer alike: of uneven alltoall each has another count.
        if max(call.count, call.total) > _COUNT_LIMIT and MPI.Get_version() < (4, 0):
            return f"counts above {_COUNT_LIMIT} need MPI 4; the library is MPI {_standard()}"
        return None

    def actions(self, call: Call) -> Actions:
        """Return actions to run in order: the library's blocking call, and arithmetic around it."""
        before, ours, after = _with_copied_input(*_around(call))
        method, *arguments = self._bound(ours, "")
        bound = partial(method, *arguments)
        if call.op is not None and not call.op.builtin:
            bound = partial(_calling, call.op, bound)
        return [*before, bound, *after]

    def started(self, call: Call) -> tuple[Actions, _Request, Actions]:
        """Return (before, request, after): the non-blocking call and the arithmetic around it."""
        before, ours, after = _with_copied_input(*_around(call))
        method, *arguments = self._bound(ours, "I")
        return before, _Request(method, arguments, call.op), after

    def _bound(self, call: Call, form: str) -> tuple:
        """Return the mpi4py method of a call, and its arguments.

        `form` is the prefix of the method's name: "" for blocking, "I" for non-blocking.
        """
        arguments = getattr(self, f"_{call.collective}")(call)
        name, *rest = arguments
        return (getattr(self.comm, form + name if not form else form + name.lower()), *rest)

    # -- arguments ------------------------------------------------------------------------------

    def _operation(self, op: Op | None, dtype: np.dtype) -> tuple[MPI.Op, MPI.Datatype]:
        """Return the MPI operation and datatype that combine elements of `dtype` by `op`.

        Where MPI has none, or one with another arithmetic, both are made here: MPI then calls a
        function of this module.
        """
        assert op is not None
        known = _library_operation(op.name, dtype) if op.builtin else None
        if known is not None:
            return known
        # A function without weak references lives as long as the operation made of it.
        holder: Any = op.function if _allows_weakref(op.function) else op
        key = (id(holder), dtype)
        if key not in self._made:
            # One element must stay one element, however the library cuts the message.
            element = self._made[key] = MPI.BYTE.Create_contiguous(dtype.itemsize).Commit()
            _FUNCTIONS[element.handle] = _elementwise(op, holder, dtype)
            weakref.finalize(holder, _forget, self._made, key).atexit = False
        return _dispatching(op.commute), self._made[key]

    def _typed(self, data: np.ndarray | DeviceArray | None, datatype: MPI.Datatype) -> list:
        if data is None or data.size == 0:
            return [None, 0, datatype]
        start = data.pointer if isinstance(data, DeviceArray) else address(data)
        return [MPI.buffer.fromaddress(start, data.nbytes), data.size, datatype]

    def _moved(self, data: np.ndarray | None, dtype: np.dtype) -> list:
        return self._typed(data, self._element(dtype))

    def _element(self, dtype: np.dtype) -> MPI.Datatype:
        datatype = mpi_datatype(dtype)
        if datatype is not None:
            return datatype
        if dtype not in self._elements:
            self._elements[dtype] = MPI.BYTE.Create_contiguous(dtype.itemsize).Commit()
        return self._elements[dtype]

    def _parts(self, call: Call, data: np.ndarray | None, counts: tuple[int, ...]) -> list:
        """Return an mpi4py buffer of all ranks' parts, which have `counts` elements.

        Of equal parts mpi4py wants the count of one, of others all counts and displacements.
        """
        memory, count, element = self._moved(data, call.dtype)
        if call.even:
            return [memory, count // call.size, element]
        return [memory, 0 if data is None else (counts, [0, *accumulate(counts)][:-1]), element]

    # -- one method per collective: (name of the mpi4py method, arguments) ------------------------

    def _source(self, call: Call, buffer: list) -> Any:
        return MPI.IN_PLACE if call.in_place else buffer

    def _barrier(self, call: Call) -> tuple:
        return ("Barrier",)

    def _allreduce(self, call: Call) -> tuple:
        op, datatype = self._operation(call.op, call.dtype)
        out = self._typed(call.out, datatype)
        return "Allreduce", self._source(call, self._typed(call.x, datatype)), out, op

    def _reduce(self, call: Call) -> tuple:
        op, datatype = self._operation(call.op, call.dtype)
        source, out = self._typed(call.x, datatype), self._typed(call.out, datatype)
        if call.rank == call.root:
            return "Reduce", self._source(call, source), out, op, call.root
        return "Reduce", source, None, op, call.root

    def _reduce_scatter(self, call: Call) -> tuple:
        op, datatype = self._operation(call.op, call.dtype)
        source, out = self._typed(call.x, datatype), self._typed(call.out, datatype)
        if call.even:
            source[1] //= call.size  # mpi4py counts the elements of one part
            return "Reduce_scatter_block", source, out, op
        return "Reduce_scatter", source, out, list(call.counts), op

    def _scan(self, call: Call) -> tuple:
        return ("Scan", *self._allreduce(call)[1:])

    def _exscan(self, call: Call) -> tuple:
        op, datatype = self._operation(call.op, call.dtype)
        if call.out is None:  # on rank 0, where MPI leaves the result undefined
            out = [np.empty(call.count, call.dtype), call.count, datatype]
            return "Exscan", self._typed(call.x, datatype), out, op
        out = self._typed(call.out, datatype)
        return "Exscan", self._source(call, self._typed(call.x, datatype)), out, op

    def _broadcast(self, call: Call) -> tuple:
        return "Bcast", self._moved(call.out, call.dtype), call.root

    def _allgather(self, call: Call) -> tuple:
        source = self._source(call, self._moved(call.x, call.dtype))
        return _with_v("Allgather", call), source, self._parts(call, call.out, call.counts)

    def _gather(self, call: Call) -> tuple:
        name, source = _with_v("Gather", call), self._moved(call.x, call.dtype)
        if call.rank != call.root:
            return name, source, None, call.root
        out = self._parts(call, call.out, call.counts)
        return name, self._source(call, source), out, call.root

    def _scatter(self, call: Call) -> tuple:
        name, out = _with_v("Scatter", call), self._moved(call.out, call.dtype)
        if call.rank != call.root:
            return name, None, out, call.root
        source = self._parts(call, call.x, call.counts)
        return name, source, self._source(call, out), call.root

    def _alltoall(self, call: Call) -> tuple:
        source = self._parts(call, call.x, call.counts)
        out = self._parts(call, call.out, call.out_counts)
        return _with_v("Alltoall", call), source, out


def _with_v(name: str, call: Call) -> str:
    """Return the name of the function for parts of the call's lengths, equal or not."""
    return name if call.even else f"{name}v"


def _around(call: Call) -> tuple[Actions, Call, Actions]:
    """Return actions before the library's call, the call for the library, and actions after it.

    The actions copy the input of a broadcast, which MPI does in place; divide the sum of a mean;
    and convert data that are accumulated in another dtype.
    """
    op = call.op
    if op is not None and op.builtin and not _needs_arithmetic(op.name, call.dtype):
        return [], call, []
    if call.collective == "broadcast" and call.x is not None and not call.in_place:
        return [partial(np.copyto, _view(call.out), _view(call.x))], call, []
    if op is None or call.x is None:
        return [], call, []
    dtype = accumulator(op, call.dtype)
    if dtype == call.dtype:
        mean = is_mean(op) and call.out is not None
        return [], call, [division(_view(call.out), call.size)] if mean else []
    divisor = call.size if divides_first(op, call.dtype) else 0
    wide = np.empty(call.x.size, dtype)
    before: Actions = [partial(widen, _view(call.x), wide, divisor)]
    if call.out is None:
        return before, replace(call, dtype=dtype, x=wide), []
    in_place = not COLLECTIVES[call.collective].per_rank  # else the result is a part of the input
    result = wide if in_place else np.empty(call.out.size, dtype)
    ours = replace(call, dtype=dtype, x=wide, out=result, in_place=in_place)
    return before, ours, [partial(narrow, result, _view(call.out))]


def _with_copied_input(
    before: Actions, call: Call, after: Actions
) -> tuple[Actions, Call, Actions]:
    """Return what :func:`_around` did, with a copy of the input where in place would crash."""
    mine = call.collective == "reduce" and call.rank == call.root != 0 and call.in_place
    if not mine or call.x is None or not _crashes_in_place():
        return before, call, after
    copy = np.empty(call.x.size, call.dtype)
    copying = partial(np.copyto, copy, _view(call.x))
    return [*before, copying], replace(call, x=copy, in_place=False), after


def _view(x: np.ndarray) -> np.ndarray:
    """Return a view that does not keep the array alive, because bound calls are cached."""
    if not x.nbytes:
        return np.empty(0, x.dtype)
    memory: Any = MPI.buffer.fromaddress(address(x), x.nbytes)
    return np.frombuffer(memory, np.uint8).view(x.dtype)


# MPI allows a process only a few operations.  So there is one for each value of `commute`: each
# function has an element type of its own, by which the operation finds it.
_FUNCTIONS: dict[int, Callable[[Any, Any], None]] = {}
_OPERATIONS: dict[bool, MPI.Op] = {}


def _dispatching(commute: bool) -> MPI.Op:
    if commute not in _OPERATIONS:

        def function(incoming: Any, result: Any, datatype: MPI.Datatype) -> None:
            _FUNCTIONS[datatype.handle](incoming, result)

        _OPERATIONS[commute] = MPI.Op.Create(function, commute)
    return _OPERATIONS[commute]


def _allows_weakref(function: object) -> bool:
    try:
        weakref.ref(function)
    except TypeError:
        return False
    return True


def _elementwise(op: Op, holder: Any, dtype: np.dtype) -> Callable[[Any, Any], None]:
    """Return the function by which MPI combines two buffers with a user's operation.

    `holder` is the user's function, or `op` if the function allows no weak reference: the returned
    function finds it by a weak reference, and so does not keep it alive.
    """
    held = weakref.ref(holder)
    commute, name, builtin = op.commute, op.name, op.builtin

    def combine(incoming: Any, result: Any) -> None:
        left, right = np.frombuffer(incoming, dtype), np.frombuffer(result, dtype)
        found: Any = held()
        ours = found if isinstance(found, Op) else Op(found, commute, name, builtin=builtin)
        ours.combine(left, right, right)

    return combine


def _forget(made: dict, key: tuple[int, np.dtype]) -> None:
    """Free the MPI datatype made for a user's function, once the function was garbage-collected.

    `made` has the datatypes by `key`: the ``id`` of the function (or its Op), and the dtype.
    """
    element = made.pop(key, None)
    if element is not None and not MPI.Is_finalized():
        _FUNCTIONS.pop(element.handle, None)
        element.Free()

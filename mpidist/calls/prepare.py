"""From what users pass to a call: checks, shapes, results; one function a collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..device.array import DeviceArray
from ..device.find import find_device
from ..device.recognise import copy_of, describe, is_on_device, make_like
from ..operations import check_defined, find_op
from .arrays import (
    address,
    as_input,
    as_output,
    check_out,
    exposed,
    flat,
    like_input,
    new_tensor,
    overlaps,
)
from .call import Call, Place, Prepared

Told = tuple[tuple[int, ...], np.dtype, str]  # shape, dtype, and "array", "tensor" or "device"


def finish(
    call: Call, shape: tuple[int, ...], out: Any, place: Place, part: slice | None = None
) -> Prepared:
    """Make or check the result of a call on a GPU; `part` as in :func:`_finish`."""
    x = call.x
    if out is None:
        assert isinstance(x, DeviceArray)
        result = make_like(x, shape, call.dtype)
        call.out = result.reshape(-1)
        return Prepared(call, result)
    result = check_target(out, shape, call.dtype, place)
    call.out = result.reshape(-1)
    if isinstance(x, DeviceArray) and x.overlaps(call.out):
        longer, shorter = (call.out, x) if call.out.size >= x.size else (x, call.out)
        own = longer if part is None else longer.part(part.start, part.stop)
        if own.size != shorter.size or own.pointer != shorter.pointer:
            allowed = "the same array" if part is None else "exactly this rank's part"
            raise place.wrong(f"out overlaps x; in place is allowed only where they are {allowed}")
        call.in_place = True
    return Prepared(call, result)


def check_target(
    out: Any, shape: tuple[int, ...], dtype: np.dtype, place: Place, argument: str = "out"
) -> DeviceArray:
    """Check that a result of `shape` and `dtype` on a GPU can be stored in `out`."""
    if not is_on_device(out):
        raise place.wrong(
            f"{argument} is in host memory ({type(out).__module__}.{type(out).__name__}) and x on "
            "a GPU; use one kind"
        )
    found = describe(out, place.rank, argument)
    if found.dtype != dtype:
        raise place.wrong(f"{argument} has dtype {found.dtype}, the result has {dtype}")
    if found.shape != shape:
        raise place.wrong(f"{argument} has shape {found.shape}, the result has {shape}")
    if found.readonly:
        raise place.wrong(f"{argument} is read-only; it must be writable")
    return found


def broadcast_target(x: Any, out: Any, place: Place, root: int) -> Prepared | None:
    """Prepare broadcast where this rank receives, if into a GPU; else give None."""
    target, argument = (x, "x") if out is None else (out, "out")
    if not is_on_device(target):
        if is_on_device(x):
            check_target(target, (), np.dtype("u1"), place)  # says that the kinds differ
        return None
    if out is not None and x is not None and not is_on_device(x):
        raise place.wrong(
            f"out is on a GPU and x in host memory ({type(x).__name__}); use one kind"
        )
    result = describe(target, place.rank, argument)
    shape = result.shape if x is None or out is None else describe(x, place.rank).shape
    result = check_target(target, shape, result.dtype, place, argument)
    call = Call("broadcast", place.rank, place.size, root, result.dtype, None, result.reshape(-1))
    return Prepared(call, result)


def scatter_target(shape: tuple[int, ...], dtype: np.dtype, place: Place) -> Any:
    """Make the result of a scatter whose root has told that its array is on a GPU."""
    return find_device(place.rank).empty(shape, dtype)


def apart(call: Call, stream: int) -> Call:
    """Return an alltoall in place as one that is not: each part is both sent and overwritten.

    The copy of its input is queued on a stream.
    """
    if call.collective != "alltoall" or not call.in_place:
        return call
    return replace(call, x=copy_of(call.x, stream), in_place=False)


def _finish(
    call: Call,
    shape: tuple[int, ...],
    out: Any,
    place: Place,
    given: Any,
    part: slice | None = None,
    scalar: bool = False,
) -> Prepared:
    """Provide the memory of the result: the user's `out`, or new; see that it does not overlap.

    A new result is a tensor if the user's input, `given`, is one.  `part` is where this rank's
    input may lie in the result (or, for scatter, the reverse) to be in place.
    """
    if type(call.x) is DeviceArray or (call.x is None and is_on_device(out)):
        return finish(call, shape, out, place, part)
    if out is None:
        result = np.empty(shape, call.dtype)
        call.out = result.reshape(-1)
        shown = None if type(given) is np.ndarray else like_input(given, result)
        return Prepared(call, result, None, scalar, shown)
    result = check_out(out, shape, call.dtype, place.rank)
    if not result.flags.c_contiguous:
        if call.x is not None and overlaps(call.x, result):
            # Packed first, so that nothing is read after it was overwritten.
            call.x = call.x.copy()
        call.out = np.empty(result.size, call.dtype)
        return Prepared(call, result, staging=call.out, shown=out)
    call.out = result.reshape(-1)
    x = call.x
    if x is not None and overlaps(x, call.out):
        longer, shorter = (call.out, x) if call.out.size >= x.size else (x, call.out)
        own = longer if part is None else longer[part]
        if own.size != shorter.size or address(own) != address(shorter):
            allowed = "the same array" if part is None else "exactly this rank's part"
            raise place.wrong(f"out overlaps x; in place is allowed only where they are {allowed}")
        call.in_place = True
    return Prepared(call, result, shown=out)


def reducing(
    collective: str,
    given: Any,
    op: Any,
    out: Any,
    commute: bool | None,
    place: Place,
    root: Any = 0,
) -> Prepared:
    """Prepare allreduce and reduce: the result has the shape of `x`."""
    op, root = find_op(op, commute), place.check_root(root)
    x = as_input(given, place.rank, device=True)
    check_defined(op, x.dtype, place.rank)
    call = Call(collective, place.rank, place.size, root, x.dtype, flat(x), None, op)
    call.agreed = _shaped("shape", x.shape, 2) if x.ndim > 1 else ""
    if collective == "reduce" and place.rank != root:
        return Prepared(call, None)
    return _finish(call, x.shape, out, place, given, scalar=x.ndim == 0)


def reduce_scatter(
    given: Any,
    op: Any,
    out: Any,
    counts: Sequence[int] | None,
    commute: bool | None,
    place: Place,
) -> Prepared:
    """Prepare reduce_scatter: rank r gets rows of the reduced `x`."""
    op = find_op(op, commute)
    x = as_input(given, place.rank, device=True)
    check_defined(op, x.dtype, place.rank)
    rows = _rows_of(x, counts, place, "reduce_scatter")
    elements = _elements(rows, x.shape[1:])
    call = Call("reduce_scatter", place.rank, place.size, 0, x.dtype, flat(x), None, op)
    call.agreed = _shaped("rows", x.shape[1:]) if x.ndim > 1 else ""
    _count(call, elements)
    shape = (rows[place.rank], *x.shape[1:])
    start = sum(elements[: place.rank])
    part = slice(start, start + elements[place.rank])
    prepared = _finish(call, shape, out, place, given, part)
    # Partial sums must not be written over what is still to be read.
    if call.in_place and type(x) is np.ndarray:
        call.in_place = False
        call.out = prepared.staging = np.empty(elements[place.rank], x.dtype)
    return prepared


def gathering(
    collective: str, given: Any, out: Any, counts: Sequence[int] | None, place: Place, root: Any = 0
) -> Prepared:
    """Prepare allgather and gather: the parts of all ranks, one after another along axis 0."""
    root = place.check_root(root)
    x = as_input(given, place.rank, device=True)
    row_shape = x.shape[1:]
    own = x.shape[0] if x.ndim else 1
    rows = (own,) * place.size
    if counts is not None:
        rows = check_counts(counts, place)
        if rows[place.rank] != own:
            raise place.wrong(
                f"x has {own} rows along axis 0, but counts[{place.rank}] is {rows[place.rank]}"
            )
    elements = _elements(rows, row_shape)
    call = Call(collective, place.rank, place.size, root, x.dtype, flat(x), None)
    call.agreed = _shaped("rows", row_shape) if x.ndim > 1 else ""
    _count(call, elements)
    if collective == "gather" and place.rank != root:
        return Prepared(call, None)
    start = sum(elements[: place.rank])
    part = slice(start, start + elements[place.rank])
    return _finish(call, (sum(rows), *row_shape), out, place, given, part)


def broadcast(x: Any, out: Any, place: Place, root: Any) -> Prepared:
    """Prepare broadcast: the root's `x` fills `out`, or `x` itself, everywhere."""
    root = place.check_root(root)
    if place.rank == root:
        data = as_input(x, place.rank, device=True)
        call = Call("broadcast", place.rank, place.size, root, data.dtype, flat(data), None)
        if out is None:
            call.out, call.in_place = call.x, True
            if type(data) is np.ndarray and exposed(x, place.rank) is not None:
                return Prepared(call, data, shown=x)
            return Prepared(call, data, scalar=data.ndim == 0)
        return _finish(call, data.shape, out, place, x)
    on_device = broadcast_target(x, out, place, root)
    if on_device is not None:
        return on_device
    target, argument = (x, "x") if out is None else (out, "out")
    if target is None:
        raise place.wrong(
            "x is None: pass an array of the root's shape and dtype to be filled, or use "
            "broadcast_object"
        )
    result = as_output(target, place.rank, argument)
    if out is not None:
        model = exposed(x, place.rank)
        if model is not None:
            check_out(result, model.shape, model.dtype, place.rank, argument)
    call = Call("broadcast", place.rank, place.size, root, result.dtype, None, None)
    if result.flags.c_contiguous:
        call.out = result.reshape(-1)
        return Prepared(call, result, shown=target)
    call.out = np.empty(result.size, result.dtype)
    return Prepared(call, result, staging=call.out, shown=target)


def scatter(
    x: Any,
    out: Any,
    counts: Sequence[int] | None,
    place: Place,
    root: int,
    told: Told | None,
) -> Prepared:
    """Prepare scatter; `told` is what the root's `x` is like if `out` is not given."""
    if place.rank == root:
        data = as_input(x, place.rank, device=True)
        shape, dtype, source = data.shape, data.dtype, flat(data)
        rows = _rows_of(data, counts, place, "scatter")
    else:
        source = None
        if told is not None:
            shape, dtype, kind = told
            rows = _split_rows(shape, counts, place, "scatter")
            own = (rows[place.rank], *shape[1:])
            if kind == "device":
                out = scatter_target(own, dtype, place)
            elif kind == "tensor":
                out = new_tensor(own, dtype)
        else:
            if is_on_device(out):
                target: Any = describe(out, place.rank, "out")
            else:
                target = as_output(out, place.rank)
            if target.ndim == 0:
                raise place.wrong("out is 0-d: scatter gives rows along axis 0")
            rows = (target.shape[0],) * place.size
            if counts is not None:
                rows = check_counts(counts, place)
            shape, dtype = (sum(rows), *target.shape[1:]), target.dtype
    elements = _elements(rows, shape[1:])
    call = Call("scatter", place.rank, place.size, root, dtype, source, None)
    _count(call, elements)
    start = sum(elements[: place.rank])
    part = slice(start, start + elements[place.rank])
    return _finish(call, (rows[place.rank], *shape[1:]), out, place, x, part)


def alltoall(
    given: Any, out: Any, sends: Sequence[int] | None, receives: Sequence[int] | None, place: Place
) -> Prepared:
    """Prepare alltoall: rows to and from each rank; None where all are equal."""
    x = as_input(given, place.rank, device=True)
    rows = _rows_of(x, sends, place, "alltoall")
    gets = rows if receives is None else check_counts(receives, place)
    call = Call("alltoall", place.rank, place.size, 0, x.dtype, flat(x), None)
    call.agreed = _shaped("rows", x.shape[1:]) if x.ndim > 1 else ""
    call.counts, call.out_counts = _elements(rows, x.shape[1:]), _elements(gets, x.shape[1:])
    call.even = sends is None
    prepared = _finish(call, (sum(gets), *x.shape[1:]), out, place, given)
    # Every part is both sent and overwritten; `x` stays, it may be symmetric.
    if call.in_place and type(x) is np.ndarray:
        call.in_place = False
        call.out = prepared.staging = np.empty(sum(call.out_counts), x.dtype)
    return prepared


def barrier(place: Place) -> Prepared:
    """Prepare a barrier: it has no data."""
    nothing = np.empty(0, np.uint8)
    call = Call("barrier", place.rank, place.size, 0, nothing.dtype, nothing, np.empty(0, np.uint8))
    return Prepared(call, None)


def check_counts(counts: Sequence[int], place: Place) -> tuple[int, ...]:
    """Give `counts` as a tuple of one number ≥ 0 per rank."""
    try:
        rows = tuple(int(c) for c in counts)
        exact = all(int(c) == c for c in counts)
    except (TypeError, ValueError):
        raise place.wrong(f"counts={counts!r}: must be one whole number per rank") from None
    if not exact or len(rows) != place.size or min(rows, default=0) < 0:
        raise place.wrong(
            f"counts={counts!r}: must be {place.size} whole numbers >= 0, the rows of each rank"
        )
    return rows


def _rows_of(
    x: np.ndarray, counts: Sequence[int] | None, place: Place, name: str
) -> tuple[int, ...]:
    return _split_rows(x.shape, counts, place, name)


def _split_rows(
    shape: tuple[int, ...], counts: Sequence[int] | None, place: Place, name: str
) -> tuple[int, ...]:
    if not shape:
        raise place.wrong(f"x is 0-d: {name} deals out rows along axis 0")
    if counts is None:
        if shape[0] % place.size:
            raise place.wrong(
                f"x has {shape[0]} rows along axis 0, which {name} cannot deal out evenly to "
                f"{place.size} "
                "ranks; say how with counts="
            )
        return (shape[0] // place.size,) * place.size
    rows = check_counts(counts, place)
    if sum(rows) != shape[0]:
        raise place.wrong(
            f"counts={counts!r} add up to {sum(rows)}, x has {shape[0]} rows along axis 0"
        )
    return rows


def _shaped(what: str, shape: tuple[int, ...], least: int = 1) -> str:
    """Return the words by which ranks compare a shape of `least` axes that are longer than 1."""
    axes = tuple(n for n in shape if n != 1)
    return f" {what}={axes}" if len(axes) >= least else ""


def _elements(rows: Sequence[int], row_shape: tuple[int, ...]) -> tuple[int, ...]:
    each = int(np.prod(row_shape, dtype=np.int64))
    return tuple(r * each for r in rows)


def _count(call: Call, elements: tuple[int, ...]) -> None:
    call.counts = call.out_counts = elements
    call.even = len(set(elements)) == 1

"""Checks of the arguments of a collective, by its contract; they become a `Call`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..device.array import DeviceArray
from ..device.recognise import as_device_array, copy_of, is_on_device
from ..errors import Unsupported
from ..operations import ANY, Op, check_defined, find_op, is_mean, settled
from ..schedule.contract import COLLECTIVES
from .arrays import (
    as_input,
    as_output,
    check_out,
    exposed,
    flat,
    kind_of_memory,
    new_result,
    overlaps,
    part_of,
    same_memory,
)
from .call import Call, Caller, Prepared

# Of the root's x, in a scatter without `out`: shape, dtype, and "array", "tensor" or "device".
Told = tuple[tuple[int, ...], np.dtype, str]


class _Role(NamedTuple):
    """The role of a rank in a collective."""

    has_input: bool
    has_result: bool
    gathers: bool  # whether the inputs of the ranks are parts of one result,
    scatters: bool  # and the results parts of one input
    compared: bool  # whether every rank has an input, whose shape can be compared between the ranks


@lru_cache(maxsize=1024)
def _role(collective: str, rank: int, size: int, root: int) -> _Role:
    contract, n = COLLECTIVES[collective], COLLECTIVES[collective].default_blocks(size)
    inputs, outputs = contract.input_blocks, contract.output_blocks
    has_input, has_result = (len(of(rank, size, root, n)) > 0 for of in (inputs, outputs))
    # On a single rank a part is the whole: asked of two, the first of which is the root.
    gathers, scatters = len(inputs(0, 2, 0, 2)) == 1, len(outputs(0, 2, 0, 2)) == 1
    return _Role(has_input, has_result, gathers, scatters, compared=len(inputs(1, 2, 0, 2)) > 0)


def prepare(
    collective: str,
    place: Caller,
    x: Any = None,
    out: Any = None,
    op: Any = None,
    commute: bool | None = None,
    order: str | None = None,
    *,
    root: Any = 0,
    counts: Sequence[int] | None = None,
    receives: Sequence[int] | None = None,
    total: int = 0,
    told: Told | None = None,
) -> Prepared:
    """Check the arguments of a collective, those of the communicator's method; return its call.

    `counts` are the rows of each rank's part; for alltoall those sent to each rank, `receives` are
    those received, `total` those that all ranks send.  `told` is for scatter without `out`.
    """
    rank, size, contract = place.rank, place.size, COLLECTIVES[collective]
    if contract.idempotent:  # a barrier has no data
        x, out = np.empty(0, np.uint8), np.empty(0, np.uint8)
        return Prepared(Call(collective, rank, size, 0, x.dtype, x, out), None)
    if contract.reduces:
        op = find_op(op, commute, order)
        if not contract.averages:
            check_partial(collective, op, place)
    root = place.check_rank(root, "root") if contract.rooted else 0
    has_input, has_result, gathers, scatters, compared = _role(collective, rank, size, root)

    # The input: in the user's shape, and flat.  A rank without one knows the memory to be filled.
    data: Any = None
    source: Any = None
    result: Any = None
    shown = out if has_result else None
    if has_input:
        data = as_input(x, rank, device=True)
        if op is not None:
            check_defined(op, data.dtype, rank)
            op = settled(op, data.dtype)
            if op.grouping != ANY and type(data) is DeviceArray:
                raise Unsupported(
                    f"rank {rank}: op={op.label} of an array on a GPU: expected host memory"
                )
        shape, dtype, source = data.shape, data.dtype, flat(data)
    elif told is not None:
        shape, dtype, _ = told
    else:
        result, shown = _target(collective, x, out, place)
        shape, dtype = result.shape, result.dtype

    # The elements of each rank's part, and the shape of the result.
    tables: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    wanted, own, even, agreed = shape, None, True, ""
    if contract.per_rank:
        each = math.prod(shape[1:])
        rows = _rows(collective, shape, counts, place, gathers, result is not None)
        into = rows if receives is None else check_counts(receives, place)
        tables = tuple([n * each for n in rows]), tuple([n * each for n in into])
        wanted = (into[rank] if scatters else sum(into), *shape[1:])
        even = counts is None
        if gathers != scatters:  # not alltoall: no rank knows all of its parts
            even = even or len(set(tables[0])) == 1
            start = sum(tables[0][:rank])
            own = slice(start, start + tables[0][rank])
    if compared and len(shape) > 1:
        agreed = _words("rows", shape[1:]) if contract.per_rank else _words("shape", shape, 2)

    # The result: the user's `out`, or new; flat, and staged where that is no view of it.
    target: Any = None
    staging = None
    in_place = scalar = fresh = False
    if collective == "broadcast" and has_input and out is None:
        # The root's `x` is the result already: it may be read-only, or a list.
        result, target, in_place, scalar = data, source, True, not shape
        if data is x or (type(data) is np.ndarray and exposed(x, rank) is not None):
            shown = x
    elif has_result:
        if result is None and out is None:
            kind = kind_of_memory(x) if told is None else told[2]
            result, shown = new_result(kind, wanted, dtype, rank, data)
            scalar, fresh = not wanted, True
        elif result is None:
            device = type(data) is DeviceArray
            if device and out is x and wanted == shape and not data.readonly:
                result = data  # to ask for its address again takes as long as to queue a copy
            else:
                result = check_out(out, wanted, dtype, rank, device)
        if not result.flags.c_contiguous:
            if source is not None and overlaps(source, result):
                source = source.copy()  # it is to be read before the result is written
        else:
            target = result.reshape(-1)
            if type(x) is np.ndarray and out is x:
                in_place = source is not None and source.nbytes > 0
            elif source is not None and out is not None:
                in_place = _is_in_place(source, target, own, place)
            # Where input is read after the first result is written, the result is staged.
            if in_place and contract.rereads and type(target) is np.ndarray:
                target, in_place = None, False
        if target is None:
            target = staging = np.empty(result.size, dtype)
            fresh = True
    call = Call(
        collective, rank, size, root, dtype, source, target, op, *tables, in_place, even, agreed
    )
    if total:
        call.total = total * math.prod(shape[1:])
    return Prepared(call, result, staging, scalar, shown, fresh)


def check_partial(collective: str, op: Op, place: Caller) -> None:
    """Raise InvalidArgument for an operation that needs the data of all ranks, if some combine."""
    if op.grouping != ANY:
        able = [
            name
            for name, known in COLLECTIVES.items()
            if known.reduces and known.averages and not known.idempotent
        ]
        raise place.wrong(
            f"op={op.label}: {collective} combines the contributions of some ranks only; expected "
            f"{', '.join(able)}"
        )
    if is_mean(op):
        raise place.wrong(
            f"op='mean': {collective} combines a different number of contributions on each rank; "
            "expected 'sum', divided by that number afterwards"
        )


def with_copied_input(call: Call, stream: int) -> Call:
    """Return an in-place call with a copy of its input as `x` where it would be overwritten unread.

    So it is of alltoall and exscan; other calls are returned unchanged.  The copy is queued on a
    GPU `stream`.
    """
    if COLLECTIVES[call.collective].input_buffer != "in" or not call.in_place:
        return call
    return replace(call, x=copy_of(call.x, stream), in_place=False)


def _target(collective: str, x: Any, out: Any, place: Caller) -> tuple[Any, Any]:
    """Return the memory to fill on a rank without input, and the user's object that exposes it."""
    target, argument = out, "out"
    if collective == "broadcast" and out is None:
        target, argument = x, "x"
        if x is None:
            raise place.wrong(
                "x is None: expected an array of the root's shape and dtype to receive into; or "
                "use broadcast_object"
            )
    elif collective == "broadcast" and x is not None:
        if is_on_device(out) and not is_on_device(x):
            raise place.wrong(
                f"out is on a GPU and x in host memory ({type(x).__name__}); expected both on "
                "the host or both on a GPU"
            )
        model = as_device_array(x, place.rank) if is_on_device(x) else exposed(x, place.rank)
        if model is not None:
            device = type(model) is DeviceArray
            return check_out(out, model.shape, model.dtype, place.rank, device), out
    device = type(target) is not np.ndarray and is_on_device(target)
    return as_output(target, place.rank, argument, device), target


def _rows(
    collective: str,
    shape: tuple[int, ...],
    counts: Sequence[int] | None,
    place: Caller,
    gathers: bool,
    received: bool,
) -> tuple[int, ...]:
    """Check `shape` against `counts`; return the number of rows of each rank's part.

    `shape` is that of `out` if `received`, else of `x`.  `gathers` is whether the ranks' inputs are
    parts of one result, as in gather.  With `gathers` or `received` the array is this rank's part;
    else it is the whole, dealt out to the ranks.
    """
    argument = "out" if received else "x"
    if not shape and not gathers:
        raise place.wrong(f"{argument} is 0-d: expected rows along axis 0 for {collective}")
    length = shape[0] if shape else 1
    rows = None if counts is None else check_counts(counts, place)
    if gathers or received:
        rows = rows or (length,) * place.size
        if rows[place.rank] != length:
            raise place.wrong(
                f"{argument} has {length} rows along axis 0, but counts[{place.rank}] is "
                f"{rows[place.rank]}"
            )
    elif rows is None:
        if length % place.size:
            raise place.wrong(
                f"x has {length} rows along axis 0, which {collective} cannot deal out evenly to "
                f"{place.size} ranks; expected counts= with the rows of each"
            )
        rows = (length // place.size,) * place.size
    elif sum(rows) != length:
        raise place.wrong(
            f"counts={counts!r} add up to {sum(rows)}, x has {length} rows along axis 0"
        )
    return rows


def check_counts(counts: Sequence[int], place: Caller) -> tuple[int, ...]:
    """Return `counts` as a tuple of one number >= 0 per rank."""
    try:
        given = tuple(counts)
        rows = tuple(map(int, given))
        exact = rows == given
    except (TypeError, ValueError):
        raise place.wrong(f"counts={counts!r}: expected one whole number per rank") from None
    if not exact or len(rows) != place.size or min(rows, default=0) < 0:
        raise place.wrong(
            f"counts={counts!r}: expected {place.size} whole numbers >= 0, the rows of each rank"
        )
    return rows


def _is_in_place(x: Any, out: Any, own: slice | None, place: Caller) -> bool:
    """Return whether input and output are one memory; raise InvalidArgument if they only overlap.

    `own` is this rank's part of the longer of the two, where one is a part of the other; else None.
    """
    if not overlaps(x, out):
        return False
    longer, shorter = (out, x) if out.size >= x.size else (x, out)
    if not same_memory(longer if own is None else part_of(longer, own), shorter):
        allowed = "the same array" if own is None else "exactly this rank's part"
        raise place.wrong(f"out overlaps x; expected separate memory, or {allowed}")
    return True


def _words(what: str, shape: tuple[int, ...], least: int = 1) -> str:
    """Return the text " `what`=`shape`" by which ranks compare shapes, without axes of length 1.

    It is empty if fewer than `least` axes are left.
    """
    axes = tuple(n for n in shape if n != 1)
    return f" {what}={axes}" if len(axes) >= least else ""

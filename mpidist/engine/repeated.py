"""Repeated calls: a call is bound once, and served again with few checks."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..backends.executor import Executor
from ..backends.program import Round
from ..calls.call import Call
from ..selection.choose import Candidate
from ..trace import Served
from .kernels import kernel_runner
from .programs import Bound, to_keep
from .sequencer import Sequencer


def repeated(
    sequencer: Sequencer,
    call: Call,
    executor: Executor,
    chosen: Candidate,
    operation: str,
    owners: Sequence[Any] | None = None,
) -> Bound:
    """Return a bound call whose ``run()`` serves the call again with few checks.

    `owners` of the call's memory are kept if an operation does not end; by default the arrays of
    `call` belong to the bound call.
    """
    bind, choice, how, call = executor.bind, chosen.choice, chosen.name, to_keep(call)
    programs = [bind(call, choice, repeated=True)]
    for turn in range(1, executor.turns):
        programs.append(bind(call, choice, repeated=True, turn=turn))
    first, watched = programs[0], list(map(weakref.ref, owners or ()))

    own = (call.x, call.out) if owners is None else ()

    def held() -> tuple[object, ...]:
        return programs, own, *(ref() for ref in watched)

    if not first.meets:
        made = sequencer.repeated_messages(operation, how, programs, held)
    elif first.interruptible:
        kernels = [(p.slot, kernel_runner(sequencer, operation, how, p)) for p in programs]
        made = sequencer.repeated_kernels(operation, how, kernels, held)
    else:
        (item,) = first.items
        assert isinstance(item, Round)
        made = sequencer.repeated_library_call(operation, item.after, held)
    door = sequencer.door
    run, within = made(door.take, door.put), made(_nothing, _nothing)
    return Bound(programs, run, within, own, served_by(call, executor, chosen))


def _nothing(_: object = None) -> None:
    """Enter or leave a door within which the caller is already."""


def served_by(call: Call, executor: Executor, chosen: Candidate) -> Served:
    """Return the Served record of a call (executor, algorithm, size), for traces."""
    algorithm = None if chosen.choice is None else chosen.name
    op = None if call.op is None else call.op.name
    return Served(executor.name, algorithm, call.nbytes, call.dtype, op)


def with_own_arrays(call: Call) -> Call:
    """Return a copy of a call with new, uninitialised arrays in place of those that it has.

    A broadcast gets one array, its result, which on the root is its input too.
    """
    out = None if call.out is None else np.empty(call.out.size, call.dtype)
    x = None if call.x is None else np.empty(call.x.size, call.dtype)
    if call.collective == "broadcast":
        x = out if call.rank == call.root else None
    return replace(call, x=x, out=out, in_place=call.collective == "broadcast")

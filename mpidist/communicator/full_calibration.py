"""The full calibration of the cost model: what it needs to predict times, not only to compare them.

Everything takes turns, called as a program calls it: the probes of messages, the library's own
collectives, and the kernels in shared memory.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter, sleep
from typing import Any

import numpy as np

from ..calls.call import Call
from ..engine.memory_probes import NAMES
from ..engine.memory_probes import SIZES as SHARED_SIZES
from ..engine.memory_probes import fit as fit_memory
from ..engine.probes import LONG, SIZES, fit
from ..engine.repeated import with_own_arrays
from ..errors import Unsupported
from ..operations import find_op
from ..schedule.contract import COLLECTIVES
from ..schedule.model import Curve, Messages
from ..selection.calibration import Calibration
from ..selection.choose import PUBLISHED
from ..selection.names import SINGLE_COPY, SYMMETRIC
from ..selection.tuning import PRIVATE
from .communicator import Communicator
from .explain import example_call
from .layers import calibrate, learn, memory_probes, probes
from .tracing import clock_offset

KERNELS = (64, 4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20)
"""Bytes of the calls of which each executor is measured."""
LEAST, MOST = 12, 60  # passes
RARELY = 3  # from one pass with calls of more than `LONG` bytes to the next
FEWEST = 5  # of them between nodes, where one takes as long as some long messages on the link
_SHORT = 6  # turns of the shortest probes in each pass
_FRONT = "recursive_doubling"
# A call by that algorithm, and the run of what it is bound to: between them is the user's door.
_PUBLIC, _BOUND = ("public", SIZES[0]), (_FRONT, SIZES[0])

Turn = tuple[Callable[[int], object], Callable[[], object]]
"""What precedes a measured call, given the number of the pass; and the call."""


def in_turns(
    comm: Communicator,
    turns: Sequence[Turn],
    seconds: float,
    least: int = LEAST,
    most: int = MOST,
    rare: Collection[int] = (),
) -> np.ndarray:
    """Measure calls in turns, in another order in each pass; collective.

    A turn is ``before(number)`` with the number of the pass, untimed, a barrier, and ``call()``.
    The first pass is not counted: in it memory is new, and calls are bound.  No pass begins after
    `seconds`, except that there are at least `least`, and at most `most`.  The turns of the indices
    `rare` are in each third pass only.

    Return the seconds from the last rank's begin to the last rank's end: a line for each pass, a
    column for each call, NaN where it was not in the pass; the same on all ranks.  On several nodes
    all begin at a time that rank 0 says, as they leave a barrier up to a message's time apart.
    Their clocks are compared before and after each pass, and taken to run evenly in between.
    """
    meet = partial(comm.barrier, "dissemination")
    passes: list[np.ndarray] = []
    compared = [_compared(comm)]
    until = perf_counter() + seconds
    while True:
        order, times = list(range(len(turns))), np.full((len(turns), 2), np.nan)
        if len(passes) % RARELY:
            order = [k for k in order if k not in rare]
        random.Random(len(passes)).shuffle(order)  # the same on all ranks
        for k in order:
            before, call = turns[k]
            before(len(passes))
            meet()
            times[k, 0] = _begun(comm, *compared[-1][1:])
            call()
            times[k, 1] = perf_counter()
        passes.append(times)
        compared.append(_compared(comm))
        last = len(passes) > most or (len(passes) > least and perf_counter() > until)
        if comm.broadcast(np.array([float(last)]), root=0, algorithm="binomial")[0]:
            break
    mine = np.array(passes[1:])
    at, ahead, _ = np.array(compared).T
    every = np.array(comm.allgather_object(mine - np.interp(mine, at, ahead)))
    return every[..., 1].max(axis=0) - every[..., 0].max(axis=0)


def fewest(comm: Communicator) -> int:
    """Return the number of passes that a measurement has at least."""
    return LEAST if comm.topology.num_nodes == 1 else FEWEST


def _compared(comm: Communicator) -> tuple[float, float, float]:
    """Return the time by this rank's clock, and how much it is ahead of rank 0's; collective.

    And the largest error of that on any rank, which is half a message's way there and back.
    """
    ahead, error = clock_offset(comm)
    several = comm.topology.num_nodes > 1
    error = float(comm.allreduce(np.array([error]), op="max")[0]) if several else 0.0
    return perf_counter(), ahead, error


def _begun(comm: Communicator, ahead: float, error: float) -> float:
    """Return the time at which all ranks begin, by this rank's clock, and not before; collective.

    On one node it is now.
    """
    nodes = comm.topology.num_nodes
    if nodes == 1:
        return perf_counter()
    # By then all have it: it takes a message's time for each power of two of the nodes, and more.
    later = perf_counter() + 4 * error * nodes.bit_length()
    begin = float(comm.broadcast(np.array([later]), root=0, algorithm="binomial")[0]) + ahead
    while perf_counter() < begin:
        sleep(0)  # lets other threads and processes run
    return begin


def tenth(times: np.ndarray) -> np.ndarray:
    """Return the 10th percentile of each column: a machine's other load only adds to times."""
    last = np.count_nonzero(~np.isnan(times), axis=0) - 1  # NaN are the last when sorted
    return np.take_along_axis(np.sort(times, axis=0), last[None] // 10, axis=0)[0]


def deviation(times: np.ndarray) -> float:
    """Return the median over the columns of the median deviation, relative to the median."""
    middle = np.nanmedian(times, axis=0)
    return float(np.median(np.nanmedian(np.abs(times - middle), axis=0) / middle))


class FullCalibration:
    """The calls that calibrate a communicator fully, its `turns` for :func:`in_turns`; collective.

    They may be measured beside others.  Those of more than `LONG` bytes are for an `nbytes` of more
    only, and on one node.  `kernels` are the candidate and collective of those that no
    schedule of messages serves.
    """

    def __init__(self, comm: Communicator, nbytes: int):
        self._comm, self._first = comm, calibrate(comm)
        long = nbytes > LONG and comm.topology.num_nodes == 1
        sizes, lengths = ([n for n in every if long or n <= LONG] for every in (SIZES, KERNELS))
        self._kernels = _kernels(comm, lengths)
        self.kernels = {(name, call.collective) for name, call, _ in self._kernels}
        self._subgroups = _subgroups(comm)
        shared, runs = memory_probes(comm)
        self._memories = {name.partition(" ")[0] for name, _ in shared}
        known: dict[tuple[str, int], Turn] = {
            key: (_writing(shared[key]), run) for key, run in runs.items()
        }
        for where, members in self._subgroups.items():
            known |= {
                (where + name, n): turn for (name, n), turn in _messages(members, sizes).items()
            }
        every = dict.fromkeys(key for keys in comm.allgather_object([*known]) for key in keys)
        # The overheads are small differences of short times, of which there are so many more.
        short = SIZES[0], SHARED_SIZES[0]
        self._keys = [key for key in every for _ in range(_SHORT if key[1] in short else 1)]
        self.turns: list[Turn] = [known.get(key, _IDLE) for key in self._keys]
        self.turns += [turn for _, _, turn in self._kernels]
        taken = [*(n for _, n in self._keys), *(call.nbytes for _, call, _ in self._kernels)]
        self.rare = {k for k, each in enumerate(taken) if each > LONG}

    def learn(self, times: np.ndarray) -> Calibration:
        """Return what the seconds of all turns (columns) make, and let "auto" use it; collective.

        The result is the same on all ranks.
        """
        comm, count = self._comm, len(self._keys)
        columns: dict[tuple[str, int], list[np.ndarray]] = {}
        for key, column in zip(self._keys, times.T):
            columns.setdefault(key, []).append(column)
        known = {key: float(tenth(np.concatenate(of))) for key, of in columns.items()}
        messages, far, front = self._fit(known)
        shared = {name: fit_memory(name, known, comm.size, front) for name in self._memories}
        points: dict[tuple[str, str], dict[int, float]] = {}
        for (name, call, _), time in zip(self._kernels, tenth(times[:, count:]).tolist()):
            points.setdefault((name, call.collective), {})[call.nbytes] = time
        curves = [(*key, Curve.through([*of], [*of.values()])) for key, of in points.items()]
        noise = deviation(times[:, :count])
        found = replace(self._first, messages=messages, far=far, noise=noise)
        if shared:
            mapped, slots, published = map(shared.get, NAMES)
            found = replace(found, mapped=mapped, slots=slots, published=published)
        ranks_per_node = tuple(map(len, comm.topology.groups))
        found = replace(found, library=comm.backend.library, ranks_per_node=ranks_per_node)
        found = replace(found, kernels=tuple(curves))
        learn(comm, found)
        return found

    def _fit(self, known: dict[tuple[str, int], float]) -> tuple[Messages, Messages | None, float]:
        """Return the models of messages within nodes and between them, and a call's front.

        Where each node has one rank all messages are between nodes, and there is one model.
        """

        def of(where: str) -> dict[tuple[str, int], float]:
            return {(name.removeprefix(where), n): s for (name, n), s in known.items()}

        first, *others = self._subgroups
        near = of(first)
        front = max(near[_PUBLIC] - near[_BOUND], 0.0)
        # Between nodes the network moves them, while the processors combine.
        messages = fit(near, front, occupies=first == _NEAR)
        far = fit(of(others[0]), front, messages.call, occupies=False) if others else None
        return messages, far, front


def why_not(comm: Communicator) -> str | None:
    """Return why times on a communicator's ranks cannot be predicted, or None if they can."""
    if comm.size < 2:
        return "1 rank: expected two or more"
    if comm.backend.crowded:
        return (
            f"{comm.size} ranks share cores: nothing can be predicted, as times are the "
            "scheduler's; expected a core for each rank"
        )
    return None


def calibrate_fully(
    comm: Communicator, seconds: float = 6.0, nbytes: int = max(KERNELS)
) -> Calibration:
    """Measure curves of messages, and the times of every executor; collective.

    With more ranks than cores, whose times are the scheduler's, and for one rank, it is
    :func:`mpidist.communicator.layers.calibrate`.

    Parameters
    ----------
    comm : Communicator
        The ranks that measure, and whose "auto" and ``explain`` use the figures.
    seconds : float
        About how long to measure.
    nbytes : int
        Bytes of the longest call to predict.  Up to 2 MiB fewer calls are measured.

    Returns
    -------
    Calibration
        The same on all ranks.
    """
    if why_not(comm) is not None:
        return calibrate(comm)
    full = FullCalibration(comm, nbytes)
    return full.learn(in_turns(comm, full.turns, seconds, fewest(comm), rare=full.rare))


def _nothing(number: int = 0) -> None:
    """Do nothing while other ranks measure."""


_IDLE: Turn = _nothing, _nothing
_NEAR, _FAR = "near ", "far "


def _subgroups(comm: Communicator) -> dict[str, Communicator | None]:
    """Return the communicators whose messages are measured; None for this rank is in none.

    On one node it is `comm` itself.  On several ones the ranks of each node at the same time, if a
    node has two, and the first ranks of all nodes.
    """
    groups = comm.topology.groups
    if len(groups) == 1:
        return {_NEAR: comm}
    place, mine = next((k, group) for k, group in enumerate(groups) if comm.rank in group)
    found = {}
    if max(map(len, groups)) > 1:
        found[_NEAR] = comm.split(place if len(mine) > 1 else None)
    found[_FAR] = comm.split(0 if comm.rank == mine[0] else None)
    return found


def _messages(comm: Communicator | None, sizes: Sequence[int]) -> dict[tuple[str, int], Turn]:
    """Return the turns of the probes of messages in a communicator, none for None; collective."""
    if comm is None:
        return {}
    calls, runs = probes(comm, _FRONT, sizes)
    small = calls[_BOUND]
    runs[_PUBLIC] = partial(comm.allreduce, small.x, "sum", small.out, _FRONT)
    calls[_PUBLIC] = small
    return {key: (_writing(calls[key]), run) for key, run in runs.items()}


def _writing(call: Call) -> Callable[[int], None]:
    """Return the function that writes the arrays of a call, the input last, as a program does."""
    arrays = [data for data in (call.out, call.x) if data is not None]

    def write(number: int) -> None:
        for data in arrays:
            data.fill(number % 5)

    return write


def _kernels(comm: Communicator, sizes: Sequence[int]) -> list[tuple[str, Call, Turn]]:
    """Return the name, an example, and the turn of the calls that no schedule of messages serves.

    They share their arrays.  Those by each executor's own name, and by single copies where that
    name does not serve them.
    """
    op = find_op("sum")
    found: list[tuple[str, Call, Turn]] = []
    symmetric = comm.topology.num_nodes == 1 and comm.backend.native is not None
    shared = [comm.empty(max(sizes), np.uint8) for _ in range(2)] if symmetric else []
    own = [np.empty(max(sizes), np.uint8) for _ in range(2)]
    for collective, contract in COLLECTIVES.items():
        for nbytes in (0,) if contract.idempotent else sizes:
            example = with_own_arrays(example_call(comm._place, collective, nbytes, op))
            for memory in (PRIVATE, SYMMETRIC)[: 1 + bool(shared and nbytes)]:
                call = _within(own if memory == PRIVATE else shared, example)
                every = [
                    one for one in comm.explain(collective, nbytes, memory=memory)[1] if one.can
                ]
                names = [one.name for one in every if one.choice is None]
                if SINGLE_COPY not in names:  # by the schedule's name, as "auto" would
                    names += [one.name for one in every if one.name == PUBLISHED]
                for one in every:
                    if one.name not in names or (memory != PRIVATE) != (one.name == SYMMETRIC):
                        continue
                    run = _public(comm, call, one.name)
                    try:
                        run()
                    except Unsupported:  # it could not be made ready, on all ranks
                        continue
                    found.append((one.name, call, (_writing(call), run)))
    return found


def _within(pool: Sequence[np.ndarray], call: Call) -> Call:
    """Return a copy of a call with its arrays in two arrays of bytes, alike on all ranks."""

    def part(k: int, data: np.ndarray | None) -> Any:
        return None if data is None else pool[k][: data.nbytes].view(call.dtype)

    out = part(1, call.out)
    return replace(call, x=out if call.x is call.out else part(0, call.x), out=out)


def _public(comm: Communicator, call: Call, algorithm: str) -> Callable[[], Any]:
    """Return the user's call for a call with arrays of its own."""
    contract, method = COLLECTIVES[call.collective], getattr(comm, call.collective)
    if contract.idempotent:
        return partial(method, algorithm)
    op, root = ["sum"] * contract.reduces, [call.root] * contract.rooted
    if call.collective == "broadcast":
        return partial(method, call.out, *root, None, algorithm)
    return partial(method, call.x, *op, *root, call.out, algorithm)

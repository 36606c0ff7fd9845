"""MSCCL++'s plans as schedules of the one-sided language, proved over several launches.

A thread block is a strand of ``parallel``; its operations between two that let its threads wait for
each other (``nop``, ``barrier``) are one round, as they may happen in any order.  A port channel is
a strand too, beside all launches: its proxy does what thread blocks ask for, one after the other,
and a kernel ends without it::

    GPU 0      the caller writes its input | thread blocks 0, 1, … | the caller reads the output | …
               port channel 0:  wait, put, signal, wait, put, …
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from ...errors import ScheduleError
from ...schedule.contract import COLLECTIVES
from ...schedule.machine import Proof
from ...schedule.prove import prove
from ...schedule.rounds import (
    Combine,
    Copy,
    Get,
    Named,
    Parallel,
    Put,
    Round,
    Schedule,
    Signal,
    Step,
    Wait,
)
from .plan import REDUCTIONS, End, Op, Place, Plan

Sync = tuple[int, int, int, int]  # GPU, thread block, operation, and the channel, semaphore, …
Progress = Callable[[int, int, str], None]
PLAIN = {  # a plan's words for patterns of the prover's texts
    r"^(rank \d+), round \d+": r"\1",  # rounds are those of the schedule, not of the plan
    r" in its round \d+": "",
    r"\brank": "GPU",
    r"(?<!thread )\bblock": "chunk",
    r"another strand": "another thread block",
}


def prove_plan(plan: Plan, without: Collection[Sync] = ()) -> Proof:
    """Prove a plan over two launches, three if halves of its scratch memory take turns.

    The caller writes the input before each launch, and reads the output after it.  No order that
    the plan leaves open may matter, no thread block wait for ever, and the output must be what the
    collective says.

    Parameters
    ----------
    plan : Plan
        A plan that was read.
    without : collection of tuple of int, optional
        Signals, waits and the like to leave out, each by GPU, thread block and operation, and by
        the channel on its GPU, the semaphore or the barrier.

    Returns
    -------
    Proof
        The proof of all launches together; `messages` are the words of all thread blocks.

    Raises
    ------
    ScheduleError
        The counter-example, with GPU, thread block, operation and launch.
    """

    def schedule(rank: int, size: int) -> Schedule:
        return gpus[rank]

    try:
        gpus = [_Kernels(plan, g, without).schedule() for g in range(len(plan.gpus))]
        return prove(
            plan.collective,
            schedule,
            len(gpus),
            blocks=plan.chunks,
            equal_blocks=True,
            memory="kernels",
        )
    except ScheduleError as error:
        text = str(error)
        for pattern, word in PLAIN.items():
            text = re.sub(pattern, word, text)
        if error.block is not None and f"chunk {error.block}: " not in text:
            text += f" (chunk {error.block})"
        raise ScheduleError(f"{plan.what}: {text}") from None


def needless_words(plan: Plan, progress: Progress = lambda *_: None) -> list[str]:
    """Return the signals with their waits, semaphores, barriers and flushes that nothing needs.

    Each is left out alone, and the rest proved again; two of them can perhaps not go together.

    Parameters
    ----------
    plan : Plan
        A plan that :func:`prove_plan` proves.
    progress : callable, optional
        Called as ``progress(done, total, label)`` after each.

    Returns
    -------
    list of str
        GPU, thread block and operation of each.
    """
    found = []
    every = list(_synchronisations(plan))
    for done, (text, syncs) in enumerate(every, 1):
        try:
            prove_plan(plan, syncs)
        except ScheduleError:
            pass
        else:
            found.append(text)
        progress(done, len(every), plan.name)
    return found


def _synchronisations(plan: Plan) -> Iterator[tuple[str, frozenset[Sync]]]:
    """Yield each synchronisation of a plan: its text, and what is left out with it."""
    ends: dict[tuple, tuple[list[Sync], list[Sync]]] = defaultdict(lambda: ([], []))
    barriers: dict[tuple[int, int, int], list[Sync]] = defaultdict(list)
    flushes: list[Sync] = []
    names: dict[Sync, str] = {}
    turns: Counter[tuple[int, int, int]] = Counter()
    for g, t, op in plan.operations():
        for end in op.ends:
            sync = (g, t, op.number, end.own)
            names[sync] = f"{_where(g, t)}, operation {op.number} ({op.name})"
            if op.name == "flush":
                flushes.append(sync)
            elif op.name in ("wait", "rlxwait"):
                ends[end.type, end.peer, g, end.number][1].append(sync)
            elif op.name != "put":
                ends[end.type, g, end.peer, end.number][0].append(sync)
        if op.name == "barrier":
            sync = (g, t, op.number, op.ids[0])
            names[sync] = f"{_where(g, t)}, operation {op.number} (barrier)"
            turns[g, t, op.ids[0]] += 1
            barriers[g, op.ids[0], turns[g, t, op.ids[0]]].append(sync)
        elif op.ids:
            for k in op.ids:
                sync = (g, t, op.number, k)
                names[sync] = f"{_where(g, t)}, operation {op.number} ({op.name})"
                ends["semaphore", g, k][op.name == "sem_acquire"].append(sync)
    groups = [list(pair) for posts, waits in ends.values() for pair in zip(posts, waits)]
    for group in (*groups, *barriers.values(), *([sync] for sync in flushes)):
        yield " and ".join(names[sync] for sync in group), frozenset(group)


def _where(gpu: int, block: int) -> str:
    return f"GPU {gpu}, thread block {block}"


@dataclass(slots=True)
class _Segment:
    """Operations of a thread block that may happen in any order: the steps, then the waits."""

    steps: list[Step] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    doing: list[Op] = field(default_factory=list)
    awaiting: list[Op] = field(default_factory=list)


class _Kernels:
    """The schedule of one GPU."""

    def __init__(self, plan: Plan, gpu: int, without: Collection[Sync]):
        self.plan, self.gpu, self.without = plan, gpu, without
        self.launches = 3 if plan.double_scratch else 2
        self.half = 0
        self.proxies: dict[int, Named] = {}  # by the number of the port channel
        every = [(t, op) for t, ops in enumerate(plan.gpus[gpu]) for op in ops]
        self.barriers: dict[int, list[int]] = defaultdict(list)
        for t, op in every:
            if op.name == "barrier" and t not in self.barriers[op.ids[0]]:
                self.barriers[op.ids[0]].append(t)

    def schedule(self) -> Schedule:
        plan, rank, size = self.plan, self.gpu, len(self.plan.gpus)
        contract, caller = COLLECTIVES[plan.collective], Named([], [])
        given = contract.input_blocks(rank, size, 0, plan.chunks)
        result = contract.output_blocks(rank, size, 0, plan.chunks)
        buffer, inputs = self._blocks(Place(rank, "i", 0, len(given)))
        for launch in range(1, self.launches + 1):
            self.half = (launch - 1) % 2 if plan.double_scratch else 0
            _add(
                caller, Copy(given, inputs, "in", buffer), f"{self._caller} before launch {launch}"
            )
            blocks = enumerate(plan.gpus[rank])
            caller.rounds.append(Parallel(tuple(self._strand(t, ops, launch) for t, ops in blocks)))
            _add(
                caller, Copy(result, result, "out", "tmp"), f"{self._caller} after launch {launch}"
            )
        # A kernel ends without the proxies: only who waits for their words knows what they did.
        return [Parallel((caller, *self.proxies.values()))]

    @property
    def _caller(self) -> str:
        return f"the caller of GPU {self.gpu}"

    def _strand(self, t: int, ops: tuple[Op, ...], launch: int) -> Named:
        """Return the rounds of a thread block in one launch."""
        strand, segment = Named([], []), _Segment()
        for op in ops:
            if op.name in ("nop", "barrier"):
                self._close(strand, t, launch, segment)
                segment = _Segment()
            if op.name == "barrier" and (self.gpu, t, op.number, op.ids[0]) not in self.without:
                others = [u for u in self.barriers[op.ids[0]] if u != t]
                text = self._name(t, launch, [op])
                for kind, ends in ((Signal, "{1} to {0}"), (Wait, "{0} to {1}")):
                    on = f"barrier {op.ids[0]}, thread block {ends}"
                    steps = tuple(kind(self.gpu, on.format(u, t)) for u in others)
                    if steps:
                        _add(strand, steps, text)
            elif op.name != "nop":
                self._put_in(segment, t, op, launch)
        self._close(strand, t, launch, segment)
        return strand

    def _close(self, strand: Named, t: int, launch: int, segment: _Segment) -> None:
        if segment.steps:
            _add(strand, tuple(segment.steps), self._name(t, launch, segment.doing))
        if segment.waits:
            _add(strand, tuple(segment.waits), self._name(t, launch, segment.awaiting))

    def _name(self, t: int, launch: int, ops: list[Op]) -> str:
        numbers = [str(op.number) for op in ops]
        many = f"operations {', '.join(numbers)}" if len(ops) > 1 else f"operation {numbers[0]}"
        names = ", ".join(op.name for op in ops)
        return f"{_where(self.gpu, t)}, {many} ({names}) of launch {launch}"

    def _put_in(self, segment: _Segment, t: int, op: Op, launch: int) -> None:
        """Add an operation to a segment."""
        kept = [(self.gpu, t, op.number, k) not in self.without for k in op.ids]
        ids = [k for k, keep in zip(op.ids, kept) if keep]
        ends = [e for e in op.ends if (self.gpu, t, op.number, e.own) not in self.without]
        steps: list[Step] = []
        waits: list[Wait] = []
        if op.name in ("wait", "rlxwait"):
            relaxed = op.name == "rlxwait"
            waits = [Wait(end.peer, _channel(end), relaxed) for end in ends]
        elif op.name == "sem_acquire":
            waits = [Wait(self.gpu, f"semaphore {k}") for k in ids]
        elif op.name == "sem_release":
            steps = [Signal(self.gpu, f"semaphore {k}") for k in ids]
        elif op.ends and op.ends[0].type == "port":
            text = f"of thread block {t}, operation {op.number} ({op.name}) of launch {launch}"
            for k, end in enumerate(op.ends):
                steps.append(Signal(self.gpu, f"the queue of port channel {end.own}"))
                waits += self._ask(op, k, end, text, end in ends)
        elif op.ends:
            relaxed = op.name == "rlxsignal"
            steps = [Signal(end.peer, _channel(end), relaxed) for end in ends]
        else:
            steps = self._data(op)
        if segment.waits and any(isinstance(step, Signal) for step in steps):
            # The thread that waits may be another one than the thread that signals.
            where = self._name(t, launch, [op])
            raise ScheduleError(
                f"{where}: signals after a wait of operation {segment.awaiting[-1].number} without "
                "a nop between them: neither is before the other"
            )
        segment.steps += steps
        segment.waits += waits
        segment.doing += [op] * bool(steps)
        segment.awaiting += [op] * bool(waits)

    def _ask(self, op: Op, k: int, end: End, text: str, kept: bool) -> list[Wait]:
        """Let the proxy of a port channel do an operation; return what the thread block awaits."""
        proxy = self.proxies.setdefault(end.own, Named([], []))
        name = f"GPU {self.gpu}, port channel {end.own}, {text}"
        _add(proxy, Wait(self.gpu, f"the queue of port channel {end.own}"), name)
        if op.name in ("put", "pws", "pwsf"):
            _add(proxy, self._move(op.sources[k], op.targets[k]), name)
        if op.name in ("signal", "pws", "pwsf") and kept:
            _add(proxy, Signal(end.peer, _channel(end)), name)
        if op.name in ("flush", "pwsf") and (kept or op.name == "pwsf"):
            done = f"the end of port channel {end.own}"
            _add(proxy, Signal(self.gpu, done), name)
            return [Wait(self.gpu, done)]
        return []

    def _data(self, op: Op) -> list[Step]:
        if op.name in REDUCTIONS:
            operands, targets = (
                tuple((place.gpu, *self._blocks(place)) for place in places)
                for places in (op.sources, op.targets)
            )
            return [Combine(operands, targets)]
        return [self._move(source, target) for source, target in zip(op.sources, op.targets)]

    def _move(self, source: Place, target: Place) -> Step:
        (one, here), (other, there) = self._blocks(source), self._blocks(target)
        if source.gpu == target.gpu:
            return Copy(here, there, one, other)
        if source.gpu == self.gpu:
            return Put(target.gpu, here, one, other, there)
        return Get(source.gpu, here, one, other, there)

    def _blocks(self, place: Place) -> tuple[str, range]:
        """Return the buffer and the blocks of a place; in place, "out" is the input as well."""
        plan, first = self.plan, place.index
        if place.buffer == "s":
            first += self.half * plan.scratch
            return "scratch", range(first, first + place.size)
        if place.buffer == "i" and not plan.inplace:
            return "input", range(first, first + place.size)
        # The shorter of the two is the part of the rank in the longer one.
        contract, size = COLLECTIVES[plan.collective], len(plan.gpus)
        part = contract.input_blocks if place.buffer == "i" else contract.output_blocks
        first += part(place.gpu, size, 0, plan.chunks).start
        return "out", range(first, first + place.size)


def _channel(end: End) -> str:
    return f"{end.type} channel {end.number}"


def _add(schedule: Named, item: Round, name: str) -> None:
    schedule.rounds.append(item)
    schedule.names.append(name)

"""GOAL, the schedules of the simulators LogGOPSim and ATLAHS: the text of a proved algorithm.

A rank has operations, ``send``, ``recv`` and ``calc``, some of which require the ends of others; a
tag is a strand.  Hoefler, Siebert and Lumsdaine, "Group Operation Assembly Language" (ICPP 2009);
Hoefler, Schneider and Lumsdaine, "LogGOPSim" (HPDC 2010).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import InvalidArgument, Unsupported
from ..measure import counted
from ..schedule.cost import cost
from ..schedule.exchange import Posted
from ..schedule.machine import Machine
from ..schedule.prove import prepare
from ..schedule.registry import Algorithm, Choice, Groups
from ..schedule.rounds import Parallel, Reduce, Schedule, Send
from ..schedule.strand import Strand
from ..schedule.unrolled import Lengths

_UNITS = ((1e-9, "ns"), (1e-10, "100 ps"), (1e-11, "10 ps"), (1e-12, "ps"))
_CLOSE = 1e-3  # of beta, by which its rounding to whole units may be wrong
_MOST = (1 << 31) - 1  # LogGOPSim keeps its parameters in an int


class _Writer(Machine):
    """The prover's machine, which writes the statements of every round that it finishes."""

    def write(self, pieces: Sequence[int], per_byte: float) -> list[list[str]]:
        """Run all ranks; return the statements of each.

        `pieces` are the bytes of each block; to combine a byte takes `per_byte` units of time.
        """
        self.pieces, self.per_byte = pieces, per_byte
        self.lines: list[list[str]] = [[] for _ in range(self.size)]
        self.labels = [0] * self.size
        self.tags: dict[tuple[int, ...], int] = {}
        self.sent: dict[tuple[Strand, int], int] = {}  # bytes of a round's message, by its step
        self.after: dict[Strand, tuple[str, ...]] = {}  # what the next round of a strand requires
        self.joined: dict[Strand, tuple[str, ...]] = {}  # the ends of a strand's inner strands
        self.freed: tuple[str, ...] | None = (
            None  # the end that lets a strand behind a window start
        )
        self.run()
        return self.lines

    def _length(self, values: list[int]) -> int:
        # LogGOPSim takes one from the size: of 0 bytes it would make 2**64 - 1.
        return max(1, sum(self.pieces[self.memory.terms.datum(value)[1]] for value in values))

    def _move(self, send: Posted, receive: Posted, sent: bool = False) -> None:
        self.sent[send.strand, send.index] = self._length(send.content)
        super()._move(send, receive, sent)

    def _start(self, strand: Strand) -> None:
        before = () if strand.parent is None else self.after[strand.parent]
        self.after[strand] = before if self.freed is None else self.freed
        super()._start(strand)

    def _open(self, parent: Strand, item: Parallel) -> bool:
        self.joined[parent] = ()
        return super()._open(parent, item)

    def _end(self, strand: Strand) -> None:
        parent, end = strand.parent, self.after.pop(strand)
        if parent is not None:
            self.joined[parent] += end
            if parent.pending == 1:
                self.after[parent] = self._join(parent.rank, self.joined.pop(parent))
        self.freed = end
        super()._end(strand)
        self.freed = None

    def _finish_round(self, strand: Strand) -> None:
        rank, tag = strand.rank, self.tags.setdefault(strand.path, len(self.tags))
        ends, work = [], 0.0
        for index, step in enumerate(strand.steps):
            if isinstance(step, Send):
                what = f"send {self.sent.pop((strand, index))}b to {step.peer} tag {tag}"
            elif index in strand.received:
                nbytes = self._length(strand.received[index][1])
                what = f"recv {nbytes}b from {step.peer} tag {tag}"  # type: ignore[union-attr]
                work += nbytes * self.per_byte if isinstance(step, Reduce) else 0
            else:
                continue  # a copy costs nothing, as in `cost`
            ends.append(self._add(rank, what, self.after[strand]))
        if ends:
            self.after[strand] = self._join(rank, tuple(ends), round(work))
        super()._finish_round(strand)

    def _join(self, rank: int, ends: tuple[str, ...], work: int = 0) -> tuple[str, ...]:
        """Return one label that stands for several: edges stay few, and combining comes last."""
        if len(ends) < 2 and not work:
            return ends
        return (self._add(rank, f"calc {work}", ends),)

    def _add(self, rank: int, what: str, required: tuple[str, ...]) -> str:
        self.labels[rank] += 1
        label = f"l{self.labels[rank]}"
        self.lines[rank] += [f"{label}: {what}", *(f"{label} requires {r}" for r in required)]
        return label


def export_goal(
    collective: str,
    choice: str | Algorithm | Choice | Callable[..., Schedule],
    size: int,
    nbytes: int,
    *,
    alpha: float,
    beta: float,
    gamma: float = 0.0,
    root: int = 0,
    arity: int = 2,
    groups: Groups | None = None,
    segments: int = 1,
    window: int | None = None,
) -> str:
    """Return a schedule as a GOAL text, after its proof.

    Comments at its head have the commands that simulate it, with the parameters of LogGOPS that
    stand for the model of :func:`~mpidist.schedule.cost.cost`, and the time of that model.  Where
    every rank sends and receives one message in a round, both times are equal; of several messages
    in a round the latencies overlap in LogGOPSim, and follow each other in that model.

    Parameters
    ----------
    collective, choice, size, nbytes, root, arity, groups, segments, window
        As for :func:`~mpidist.schedule.cost.cost`.
    alpha : float
        Seconds per message.
    beta, gamma : float
        Seconds per byte sent, > 0, and per byte combined.

    Returns
    -------
    str
        The text; a time is a whole number of the unit that the first comment names.

    Raises
    ------
    ScheduleError
        If the schedule is wrong.
    Unsupported
        If it needs shared memory, for which GOAL has no words.
    """
    known, machine = prepare(
        collective,
        choice,
        size,
        root,
        arity=arity,
        groups=groups,
        segments=segments,
        window=window,
        machine=_Writer,
    )
    assert isinstance(machine, _Writer)
    if known.memory is not None:
        raise Unsupported(f"{known.label} needs shared memory: GOAL has messages only")
    unit, name = _unit(alpha, beta)
    model = {"alpha": alpha, "beta": beta, "gamma": gamma, "window": window}
    given = {"root": root, "arity": arity, "groups": groups, "segments": segments}
    seconds = cost(collective, choice, size, nbytes, **model, **given).seconds  # type: ignore[arg-type]
    pieces = Lengths.even(nbytes, max(machine.count // segments, 1), segments).outgoing
    ranks = machine.write(pieces, gamma / unit)
    lines = [
        f"// {known.label} on {counted(size, 'rank')}, {counted(nbytes, 'byte')}; "
        f"proved and written by mpidist; times in {name}",
        "// txt2bin -i FILE.goal -o FILE.bin",
        f"// LogGOPSim -f FILE.bin -L {round(alpha / unit)} -o 0 -g 0 -G {round(beta / unit)} "
        f"-O 0 -S {_MOST} -b",
        f"// mpidist's own model of these parameters: {round(seconds / unit)}",
        f"num_ranks {size}",
    ]
    for rank, statements in enumerate(ranks):
        # A rank without an operation has one that takes no time: the parser expects some.
        lines += [f"rank {rank} {{", *(statements or ["l1: calc 0"]), "}"]
    return "\n".join(lines) + "\n"


def _unit(alpha: float, beta: float) -> tuple[float, str]:
    """Return the longest unit of time, with its name, of which `beta` is nearly a whole number."""
    if beta <= 0:
        raise InvalidArgument(f"beta={beta}: expected seconds per byte > 0")
    fitting = (u for u in _UNITS if abs(round(beta / u[0]) * u[0] - beta) <= _CLOSE * beta)
    unit, name = next(fitting, _UNITS[-1])
    if not 0 <= alpha / unit <= _MOST or beta / unit > _MOST:
        raise InvalidArgument(
            f"alpha={alpha}, beta={beta}: expected at most {_MOST * unit:.3g} s, as LogGOPSim has "
            f"32 bits for each, in {name}"
        )
    return unit, name

"""The steps of a schedule with their times, as the prover's machine runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..measure import counted
from .drawing import Move, Reading, name_numbers
from .exchange import Posted
from .machine import Machine
from .prove import prepare
from .registry import Algorithm, Choice, Groups, find
from .rounds import (
    Blocks,
    Combine,
    Fold,
    Get,
    Meet,
    Put,
    Reduce,
    Schedule,
    Signal,
    Wait,
    block_tuple,
)
from .strand import Strand


def read(
    collective: str,
    choice: str | Algorithm | Choice | Callable[..., Schedule],
    size: int,
    root: int = 0,
    arity: int = 2,
    groups: Groups | None = None,
    segments: int = 1,
) -> Reading:
    """Run a schedule on the prover's machine and return its messages and copies.

    Parameters are those of :func:`~mpidist.schedule.prove`, and so is the ScheduleError of a wrong
    one: only proved schedules are drawn.
    """
    moves: list[Move] = []
    if isinstance(choice, str):
        choice = find(collective, choice)
    known, machine = prepare(
        collective, choice, size, root, arity=arity, groups=groups, segments=segments
    )
    machine.watch = _Recorder(machine, moves)
    proof = machine.run()
    title = f"{known.label} on {counted(size, 'rank')}"
    if "arity" in known.uses:
        title += f", arity {(choice.arity if isinstance(choice, Choice) else None) or arity}"
    if known.contract.rooted:
        title += f", root {root}"
    if segments > 1:
        title += f", {segments} segments"
    moves.sort(key=_order)
    return Reading(title, size, proof, moves, groups if "groups" in known.uses else None)


def _order(move: Move) -> tuple:
    """Return the sort key of a Move: time, strand, messages before copies, distance of ranks."""
    distance, local = abs(move.target - move.source), move.local
    return move.time, move.strand, local, distance, move.source, move.send_index


class _Recorder:
    """A `watch` function of a :class:`Machine`, which appends messages and copies to `moves`."""

    def __init__(self, machine: Machine, moves: list[Move]):
        self.machine, self.moves = machine, moves

    def __call__(self, step: Any, strand: Strand, send: Posted | None) -> None:
        if isinstance(step, (Get, Put, Fold, Meet)):
            self.moves.append(self._one_sided(step, strand))
            return
        if isinstance(step, Combine):
            self.moves += self._combined(step, strand)
            return
        if isinstance(step, (Signal, Wait)):  # a word is drawn where it is awaited
            if isinstance(step, Wait):
                self.moves.append(self._awaited(step, strand))
            return
        if send is None:  # a Copy
            sent = self._blocks(step.source_blocks, step.source)
            received = self._blocks(step.target_blocks, step.target)
            source, kind, time, turn = strand.rank, "copy", strand.clock, 0
        else:
            sent = self._blocks(send.step.blocks, send.step.buffer)
            received = self._blocks(step.blocks, step.buffer)
            source, kind = send.strand.rank, "reduce" if isinstance(step, Reduce) else "receive"
            time, turn = self.machine.arrival, send.index
        index = next((i for i, other in enumerate(strand.steps) if other is step), 0)
        move = Move(time, source, strand.rank, kind, sent, received, strand.path, turn, index)
        self.moves.append(move)

    def _one_sided(self, step: Get | Put | Fold | Meet, strand: Strand) -> Move:
        rank, time = strand.rank, strand.clock
        if isinstance(step, Meet):
            awaits = tuple(step.group if step.awaits is None else step.awaits)
            return Move(time, rank, rank, "meet", "", "", strand.path, ranks=awaits)
        to = step.blocks if step.to is None else step.to
        read, written = self._blocks(step.blocks, step.source), self._blocks(to, step.target)
        if isinstance(step, Fold):
            if step.own is not None:
                own = self._blocks(to, step.own)
                short = read.removesuffix(own.removeprefix(step.own))
                read = f"{short}/{own}" if short == step.source else f"{read}/{own}"
            peers = tuple(sorted(step.peers))
            return Move(time, rank, rank, "fold", read, written, strand.path, ranks=peers)
        index = next((i for i, other in enumerate(strand.steps) if other is step), 0)
        source, target = (step.peer, rank) if isinstance(step, Get) else (rank, step.peer)
        kind = "get" if isinstance(step, Get) else "put"
        return Move(time, source, target, kind, read, written, strand.path, index, index)

    def _combined(self, step: Combine, strand: Strand) -> Iterator[Move]:
        """Yield a Combine as a Fold, and as a Put into each other rank."""
        rank, time = strand.rank, strand.clock
        _, buffer, blocks = step.operands[0]
        read = self._blocks(blocks, buffer)
        ranks = tuple(sorted({peer for peer, _, _ in step.operands}))
        for peer, buffer, blocks in step.targets:
            written = self._blocks(blocks, buffer)
            if peer == rank:
                yield Move(time, rank, rank, "fold", read, written, strand.path, ranks=ranks)
            else:
                yield Move(time, rank, peer, "put", written, written, strand.path)

    def _awaited(self, step: Wait, strand: Strand) -> Move:
        """Return a word of another rank as an empty message, one of its own rank as a meeting."""
        rank, time = strand.rank, strand.clock
        if step.peer == rank:
            return Move(time, rank, rank, "meet", "", "", strand.path, ranks=(rank,))
        return Move(time, step.peer, rank, "receive", "", "", strand.path)

    def _blocks(self, spec: Blocks, buffer: str) -> str:
        return name_blocks(block_tuple(spec), self.machine.count, buffer)


def name_blocks(blocks: tuple[int, ...], count: int, buffer: str = "out") -> str:
    """Return block numbers as text in brackets, after the buffer's name if it is not ``out``.

    If the data are one block (`count` is 1), there are no brackets; all blocks are ``[all]``.

    >>> name_blocks((0, 1, 2, 5), 8), name_blocks((3,), 8, "tmp"), name_blocks((0,), 1)
    ('[0-2,5]', 'tmp[3]', '')
    """
    prefix = "" if buffer == "out" else buffer
    if count == 1:
        return prefix
    # Of tmp a schedule may use fewer blocks than `count`, or more: these need not be all.
    if blocks == tuple(range(count)) and buffer != "tmp":
        return f"{prefix}[all]"
    return f"{prefix}[{name_numbers(blocks)}]"

"""Schedules of any steps run on all ranks in one thread, in an order drawn at random.

Each block that is copied or combined is one action, and any rank can have the next turn, so a race
shows as a wrong value sooner or later.  A rank's caller fills its buffers when the rank has its
first turn, and when it has returned it overwrites them with `GARBAGE`.  The two sets of slots take
turns in several calls.
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from random import Random
from typing import Any

from mpidist.errors import DeadlockError, MpidistError
from mpidist.schedule.contract import Contract
from mpidist.schedule.rounds import (
    Copy,
    Fold,
    Get,
    Meet,
    Parallel,
    Put,
    Recv,
    Reduce,
    Send,
    block_tuple,
    steps_of,
)


class Garbage:
    """What no caller has written, alone or combined with data."""

    def __repr__(self) -> str:
        return "GARBAGE"


GARBAGE = Garbage()


class WrongValue(MpidistError):
    """The result is not what the contract promises."""


class Interleaving:
    """One run of a schedule, with the ranks' turns drawn from `random`.

    `calls` has the data by (rank, block) of each call; ``combine(a, b)`` is the operation.  With
    `in_place` the buffers "in" and "out" are one, unless the input is apart (alltoall).
    """

    def __init__(
        self, contract: Contract, root: int, count: int, calls, combine, random: Random, in_place
    ):
        self.contract, self.root, self.count, self.calls = contract, root, count, calls
        self.combine_values, self.random = combine, random
        self.in_place = in_place and contract.input_buffer != "in"
        self.memory: dict[tuple[int, str], dict[int, Any]] = defaultdict(dict)
        self.sent: dict[tuple, deque] = defaultdict(deque)
        self.arrived: dict[tuple, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        self.results: list[list[dict[int, Any]]] = []

    def run(self, parts: list) -> list[list[dict[int, Any]]]:
        """Run all ranks, and return the buffer "out" of each at its returns."""
        self.size = len(parts)
        self.call = [0] * self.size
        if self.in_place:
            for rank in range(self.size):
                self.memory[rank, "in"] = self.memory[rank, "out"]
        self.results = [[] for _ in parts]
        active = [self._rank(rank, part) for rank, part in enumerate(parts)]
        self.random.shuffle(active)
        while active:
            if self.random.random() < 0.2:
                self.random.shuffle(active)  # the first that can go on goes on
            for process in active:
                moved = next(process, None)
                if moved is None:
                    active.remove(process)
                if moved is not False:
                    break
            else:
                raise DeadlockError(f"{len(active)} ranks wait, and nothing moves")
        if any(self.sent.values()):
            raise WrongValue("messages that nobody received")
        return self.results

    def check(self, parts: list) -> None:
        """Run all ranks, and raise unless each has what the contract promises."""
        contract, root, n = self.contract, self.root, self.count
        for rank, results in enumerate(self.run(parts)):
            for inputs, found, block in (
                (inputs, found, block)
                for inputs, found in zip(self.calls, results, strict=True)
                for block in contract.output_blocks(rank, self.size, root, n)
            ):
                if contract.reduces:
                    first, *others = contract.contributions(rank, self.size)
                    wanted = inputs[first, block]
                    for other in others:
                        wanted = self.combine_values(wanted, inputs[other, block])
                else:
                    wanted = inputs[contract.origin(rank, block, self.size, root, n)]
                if found.get(block, GARBAGE) != wanted:
                    raise WrongValue(f"rank {rank} ends with {found.get(block)} in block {block}")

    # Each of these yields True after an action, and False if it must wait.

    def _rank(self, rank: int, part) -> Iterator[bool]:
        for number, inputs in enumerate(self.calls):
            self.call[rank] = number
            yield from self._called(rank, part, inputs)

    def _held(self, rank: int, owner: int, buffer: str) -> dict[int, Any]:
        """The buffer of `owner` that `rank` means in its present call."""
        turn = f".{self.call[rank] % 2}" if buffer.startswith("slot") else ""
        return self.memory[owner, buffer + turn]

    def _called(self, rank: int, part, inputs) -> Iterator[bool]:
        contract = self.contract
        mine = contract.input_blocks(rank, self.size, self.root, self.count)
        for buffer in ("in", "out", "tmp"):  # the caller may have written anything before
            held = self.memory[rank, buffer]
            held.update(dict.fromkeys(held, GARBAGE))
        for buffer in {"in", contract.input_buffer}:
            self.memory[rank, buffer].update({b: inputs[rank, b] for b in mine})
        yield True
        yield from self._strand(rank, part, ())
        self.results[rank].append(dict(self.memory[rank, "out"]))
        for buffer in ("in", "out", "tmp"):
            held = self.memory[rank, buffer]
            held.update(dict.fromkeys(held, GARBAGE))

    def _strand(self, rank: int, part, path: tuple) -> Iterator[bool]:
        for item in part:
            if isinstance(item, Parallel):
                strands = [self._strand(rank, s, (*path, k)) for k, s in enumerate(item.strands)]
                yield from self._together(strands)
                continue
            steps = steps_of(item)
            if any(isinstance(step, (Send, Recv, Reduce)) for step in steps):
                yield from self._messages(rank, steps, path)
            elif steps and isinstance(steps[0], Meet):
                yield from self._meet(rank, steps[0], path)
            else:
                moves = [move for step in steps for move in self._moves(rank, step)]
                ordered = not any(isinstance(step, (Get, Put, Fold)) for step in steps)
                if not ordered:
                    self.random.shuffle(moves)
                for target, place, values in moves:
                    target[place] = self._combined(values)
                    yield True

    def _together(self, strands: list) -> Iterator[bool]:
        while strands:
            self.random.shuffle(strands)
            for strand in list(strands):
                moved = next(strand, None)
                if moved is None:
                    strands.remove(strand)
                if moved is not False:
                    break
            else:
                yield False
                continue
            yield True

    def _moves(self, rank: int, step) -> Iterator[tuple[dict, int, list]]:
        """Yield (buffer, block, sources) of each block that a step writes."""
        if isinstance(step, Copy):
            here, there = step.source_blocks, step.target_blocks
        else:
            here, there = step.blocks, step.blocks if step.to is None else step.to
        for a, b in zip(block_tuple(here), block_tuple(there), strict=True):
            if isinstance(step, Fold):
                sources = [(peer, step.source, a) for peer in step.peers]
                if step.own is not None and rank in step.peers:
                    sources[step.peers.index(rank)] = (rank, step.own, b)
                sources = [(self._held(rank, q, buffer), q, block) for q, buffer, block in sources]
                yield self._held(rank, rank, step.target), b, sources
            else:
                source = step.peer if isinstance(step, Get) else rank
                target = step.peer if isinstance(step, Put) else rank
                held = self._held(rank, source, step.source)
                yield self._held(rank, target, step.target), b, [(held, source, a)]

    def _combined(self, sources: list) -> Any:
        first, *others = sources
        value = self._value(first)
        for other in others:
            more = self._value(other)
            value = self._both(more, value) if other[1] < first[1] else self._both(value, more)
        return value

    def _value(self, place: tuple[dict, int, int]) -> Any:
        held, _, block = place
        return held.get(block, GARBAGE)

    def _both(self, left: Any, right: Any) -> Any:
        if left is GARBAGE or right is GARBAGE:
            return GARBAGE
        return self.combine_values(left, right)

    def _messages(self, rank: int, steps: tuple, path: tuple) -> Iterator[bool]:
        memory = self.memory
        for step in steps:
            if isinstance(step, Send):
                values = [
                    memory[rank, step.buffer].get(b, GARBAGE) for b in block_tuple(step.blocks)
                ]
                self.sent[rank, step.peer, path].append(values)
        for step in steps:
            if isinstance(step, Copy):
                for target, place, values in self._moves(rank, step):
                    target[place] = self._combined(values)
            elif not isinstance(step, Send):
                queue = self.sent[step.peer, rank, path]
                while not queue:
                    yield False
                held = memory[rank, step.buffer]
                for block, value in zip(block_tuple(step.blocks), queue.popleft(), strict=True):
                    if isinstance(step, Reduce):
                        own = held.get(block, GARBAGE)
                        low, high = (value, own) if step.peer < rank else (own, value)
                        value = self._both(low, high)
                    held[block] = value
        yield True

    def _meet(self, rank: int, step: Meet, path: tuple) -> Iterator[bool]:
        counts = self.arrived[path, tuple(step.group)]
        counts[rank] += 1
        number = counts[rank]
        if self.contract.idempotent:  # what a barrier tells is who has come
            self.memory["tokens", path, tuple(step.group)][rank, number] = dict(
                self.memory[rank, "out"]
            )
        awaits = step.group if step.awaits is None else step.awaits
        while any(counts[peer] < number for peer in awaits):
            yield False
        if self.contract.idempotent:
            held = self.memory[rank, "out"]
            for peer in awaits:
                for block, value in self.memory["tokens", path, tuple(step.group)][
                    peer, number
                ].items():
                    held[block] = self.combine_values(held[block], value)
        yield True

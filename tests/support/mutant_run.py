"""Runs schedules, broken ones too, with the real engine: all ranks in one thread, primes as data.

Every block has a length of its own, so that none can pass for another; a send ends only when its
message has been taken, the strictest rule that MPI allows; and when in a whole pass over the ranks
nothing moves, that is a deadlock.
"""

from __future__ import annotations

from random import Random

import numpy as np

from mpidist.backends.simulated import SimulatedBackend
from mpidist.engine.binding import Binder
from mpidist.engine.run import Run
from mpidist.engine.storage import HostMemory, Storage
from mpidist.errors import DeadlockError, MpidistError
from mpidist.operations import Op
from mpidist.schedule.contract import Contract
from mpidist.schedule.unrolled import Lengths, materialise

PRODUCT = Op(np.multiply, name="prod", builtin=True)
UNION = Op(np.bitwise_or, name="or", builtin=True)


def primes(n: int) -> list[int]:
    found: list[int] = []
    number = 2
    while len(found) < n:
        if all(number % p for p in found):
            found.append(number)
        number += 1
    return found


PRIMES = primes(700)


class WrongResult(MpidistError):
    """The data are not what the contract promises."""


class Rendezvous(SimulatedBackend):
    """A simulated rank whose sends end when they are received."""

    def isend(self, data, peer, tag):
        super().isend(data, peer, tag)
        counts = self.__dict__.setdefault("counts", {})
        key = (self.rank, peer, tag)
        counts[key] = number = counts.get(key, 0) + 1
        return _Synchronous(self, key, number)

    def pump(self):
        """Take what has come for the receives that are posted, as MPI does in every call."""
        for queue in self._posted.values():
            if queue:
                queue[0].test()


class _Synchronous:
    def __init__(self, backend, key, number):
        self.backend, self.key, self.number = backend, key, number

    def test(self) -> bool:
        self.backend.pump()
        taken = self.backend.counts[self.key] - len(self.backend._group.boxes[self.key])
        return taken >= self.number


class Trial:
    """The data of one collective for `size` ranks, cut into `count` blocks."""

    def __init__(self, contract: Contract, size: int, root: int, count: int, equal: bool):
        self.contract, self.size, self.root, self.count = contract, size, root, count
        random = Random(size * 1000 + count)
        lengths = random.sample(range(20, 20 + 40 * (size * count + 2)), size * count)
        self.lengths: dict[object, int] = {}
        for rank in range(size):
            for buffer in ("in", "out"):
                for block in range(count):
                    slot = contract.slot(rank, buffer, block, size, count)
                    if slot not in self.lengths:
                        self.lengths[slot] = 7 if equal else lengths.pop()
        self.values = {
            (rank, block): self._value(rank, block)
            for rank in range(size)
            for block in range(count)
        }
        self.wanted = [self._wanted(rank) for rank in range(size)]

    def _value(self, rank: int, block: int) -> int:
        if self.contract.idempotent:
            return 1 << rank
        return PRIMES[rank * self.count + block]

    def length(self, rank: int, buffer: str, block: int) -> int:
        return self.lengths[self.contract.slot(rank, buffer, block, self.size, self.count)]

    def brought(self, rank: int) -> np.ndarray:
        c = self.contract
        mine = c.input_blocks(rank, self.size, self.root, self.count)
        parts = [
            np.full(self.length(rank, c.input_buffer, b), self.values[rank, b], np.int64)
            for b in mine
        ]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def _wanted(self, rank: int) -> np.ndarray:
        c, parts = self.contract, [np.empty(0, np.int64)]
        for block in c.output_blocks(rank, self.size, self.root, self.count):
            if c.reduces:
                operation = np.bitwise_or if c.idempotent else np.multiply
                value = operation.reduce([self.values[r, block] for r in range(self.size)])
            else:
                value = self.values[c.origin(rank, block, self.size, self.root, self.count)]
            parts.append(np.full(self.length(rank, "out", block), value, np.int64))
        return np.concatenate(parts)

    def run(self, parts: list) -> None:
        """Run a schedule; an error says what is wrong with it."""
        backends = Rendezvous.create_group(self.size)
        x = [self.brought(rank) for rank in range(self.size)]
        before = [data.copy() for data in x]
        # What is never written must not look right.
        out = [np.full(w.size, -1, np.int64) for w in self.wanted]
        runs = [Run(self._bind(b, parts[b.rank], x[b.rank], out[b.rank])) for b in backends]
        self._turn(runs, backends)
        if left := backends[0].unreceived():
            raise WrongResult(f"messages that nobody received: {left}")
        for rank in range(self.size):
            if not np.array_equal(out[rank], self.wanted[rank]):
                raise WrongResult(f"rank {rank} ends with other data")
            if not np.array_equal(x[rank], before[rank]):
                raise WrongResult(f"rank {rank} has written to its input")

    def _bind(self, backend, part, x: np.ndarray, out: np.ndarray):
        rank, c = backend.rank, self.contract
        lengths = Lengths(
            tuple(self.length(rank, "in", b) for b in range(self.count)),
            tuple(self.length(rank, "out", b) for b in range(self.count)),
        )
        place = (rank, self.size, self.root)
        storage = Storage(c, place, lengths, x, out, HostMemory(np.dtype(np.int64)))
        op = UNION if c.idempotent else PRODUCT
        return Binder(backend, storage, op, False).program(materialise(part))

    def _turn(self, runs: list, backends: list) -> None:
        boxes, seen = backends[0]._group.boxes, None
        while True:
            done = [run.test() for run in runs]
            if all(done):
                return
            sent = sum(b._sent for b in backends)
            now = (sum(done), sent, sum(map(len, boxes.values())))
            if now == seen:
                raise DeadlockError(f"{done.count(False)} ranks wait, and nothing moves")
            seen = now

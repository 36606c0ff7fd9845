"""Break algorithms at random: what the prover says of each mutant must be what a run shows.

python tests/mutation.py                      # 2000 mutants of every algorithm
python tests/mutation.py --mutants 100 ring   # of those whose label holds "ring"

Algorithms in shared memory are run in many orders of the ranks' turns: what the prover accepts must
be right in all of them.  Of what it rejects for a wrong result, a race or a deadlock, one of them
goes wrong; the others are counted as unseen.
"""

from __future__ import annotations

import argparse
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np

import mpidist  # noqa: F401  (registers the algorithms)
from mpidist.backends.simulated import SimulatedBackend
from mpidist.engine.binding import Binder
from mpidist.engine.run import Run, polled
from mpidist.engine.storage import HostMemory, Storage
from mpidist.errors import DeadlockError, MpidistError, ScheduleError
from mpidist.operations import Op
from mpidist.schedule import Algorithm, algorithms, find
from mpidist.schedule.contract import Contract
from mpidist.schedule.machine import Machine
from mpidist.schedule.rounds import (
    BUFFERS,
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
from mpidist.schedule.unrolled import Lengths, materialise
from tests.support.interleavings import Interleaving

SIZES = (2, 3, 4, 5, 6)

# A mutant is a schedule with a step dropped, doubled or changed.  A trial plays a schedule with all
# ranks in one thread and primes as data: every block has a length of its own, so that none can pass
# for another; a send ends only when its message has been taken, the strictest rule that MPI allows;
# and when in a whole pass over the ranks nothing moves, that is a deadlock.

Where = tuple[int, ...]  # item, strand, item, strand, …, item, step


def write_down(schedule) -> list:
    """A schedule as lists of rounds, each a tuple of steps or a `Parallel` of such lists."""
    written = []
    for item in schedule:
        if isinstance(item, Parallel):
            strands = tuple(write_down(strand) for strand in item.strands)
            written.append(Parallel(strands, item.window))
        else:
            written.append(steps_of(item))
    return written


def paths(written: list, prefix: Where = ()) -> Iterator[Where]:
    """Where the steps are."""
    for i, item in enumerate(written):
        if isinstance(item, Parallel):
            for k, strand in enumerate(item.strands):
                yield from paths(strand, (*prefix, i, k))
        else:
            yield from ((*prefix, i, j) for j in range(len(item)))


def step_at(written: list, path: Where):
    """The step at a path; None if there is none."""
    try:
        while len(path) > 2:
            written, path = written[path[0]].strands[path[1]], path[2:]
        return written[path[0]][path[1]]
    except (IndexError, AttributeError, TypeError):
        return None


def put(written: list, path: Where, steps: tuple) -> list:
    """A copy with `steps` instead of the one step at a path."""
    changed, i = list(written), path[0]
    item = written[i]
    if len(path) > 2:
        strands = list(item.strands)
        strands[path[1]] = put(strands[path[1]], path[2:], steps)
        changed[i] = Parallel(tuple(strands), item.window)
    else:
        changed[i] = (*item[: path[1]], *steps, *item[path[1] + 1 :])
        if not changed[i]:
            del changed[i]
    return changed


class Change:
    """One change, the same for whichever rank it is applied to; `what` says it in words."""

    def __init__(self, random: Random, size: int, count: int, step, buffers=BUFFERS):
        self.buffers = buffers
        kinds = ["drop", "drop", "blocks", "blocks", "blocks", "double", "buffer"]
        if isinstance(step, Meet):
            kinds = ["drop", "drop", "drop", "double", "await", "await", "group", "swap", "swap"]
        elif isinstance(step, Fold):
            kinds += ["peers", "peers", "swap"]
        elif isinstance(step, (Get, Put)):
            kinds += ["peer", "peer", "peer", "swap"]
        elif not isinstance(step, Copy):
            kinds += ["peer", "peer", "peer"]
        if isinstance(step, (Recv, Reduce)):
            kinds += ["kind"]
        self.kind = random.choice(kinds)
        self.size, self.count = size, count
        self.by = random.randrange(1, max(size, 2))
        self.shift = random.choice([-1, 1, random.randrange(1, count + 1)])
        self.how = random.choice(["shift", "shift one", "shorten", "reverse", "beyond"])
        self.which = random.randrange(64)
        self.what = f"{self.kind} by {self.by}, {self.how} by {self.shift}"

    def __call__(self, step) -> tuple:
        """The steps that stand where `step` stood."""
        if self.kind == "drop":
            return ()
        if self.kind == "double":
            return (step, step)
        if self.kind in ("await", "group", "peers"):
            return (self._other_ranks(step),)
        if self.kind == "buffer" and not isinstance(step, (Send, Recv, Reduce)):
            if isinstance(step, Meet):
                return (step,)
            name = ("source", "target")[self.which % 2]
            others = [b for b in self.buffers if b != getattr(step, name)]
            return (replace(step, **{name: others[self.which // 2 % len(others)]}),)
        if self.kind == "buffer":
            name = "target" if isinstance(step, Copy) else "buffer"
            other = BUFFERS[(BUFFERS.index(getattr(step, name)) + 1 + self.which % 2) % 3]
            return (replace(step, **{name: other}),)
        if self.kind == "kind" and isinstance(step, (Recv, Reduce)):
            other = Reduce if isinstance(step, Recv) else Recv
            return (other(step.peer, step.blocks, step.buffer),)
        if self.kind == "peer" and isinstance(step, (Send, Recv, Reduce, Get, Put)):
            return (replace(step, peer=(step.peer + self.by) % self.size),)
        if isinstance(step, Copy):
            side = "source_blocks" if self.which % 2 else "target_blocks"
            return (replace(step, **{side: self._blocks(getattr(step, side))}),)
        if not hasattr(step, "blocks"):  # a Meet, where another rank has another step
            return ()
        if isinstance(step, (Get, Put, Fold)) and step.to is not None and self.which % 2:
            return (replace(step, to=self._blocks(step.to)),)
        return (replace(step, blocks=self._blocks(step.blocks)),)

    def _other_ranks(self, step):
        """The step with one rank less or in another place; the step itself if it has no ranks."""
        if isinstance(step, Fold):
            peers = list(step.peers)
            gone = peers.pop(self.which % len(peers))
            if self.by % 2:
                peers.append(gone)
            return replace(step, peers=tuple(peers))
        if not isinstance(step, Meet):
            return step
        fewer = tuple(r for k, r in enumerate(step.group) if k != self.which % len(step.group))
        return replace(step, **{"awaits" if self.kind == "await" else "group": fewer})

    def _blocks(self, spec):
        numbers = list(block_tuple(spec))
        if not numbers:
            return spec
        at = self.which % len(numbers)
        if self.how == "shorten" and len(numbers) > 1:
            del numbers[at]
        elif self.how == "reverse" and len(numbers) > 1:
            numbers.reverse()
        elif self.how == "shift" and len(numbers) > 1:
            numbers = [(n + self.shift) % self.count for n in numbers]
        elif self.how == "beyond":
            numbers[at] += self.count
        else:
            numbers[at] = (numbers[at] + self.shift) % self.count
        return numbers[0] if isinstance(spec, int) else tuple(numbers)


def swapped(written: list, path: Where) -> list:
    """A copy in which the round that holds a step, and the next one, have changed places."""
    changed, i = list(written), path[0]
    if len(path) > 2:
        item = written[i]
        strands = list(item.strands)
        strands[path[1]] = swapped(strands[path[1]], path[2:])
        changed[i] = Parallel(tuple(strands), item.window)
    elif i + 1 < len(written):
        changed[i], changed[i + 1] = changed[i + 1], changed[i]
    return changed


def mutate(
    random: Random, parts: list[list], count: int, buffers: tuple[str, ...] = BUFFERS
) -> tuple[list[list], str] | None:
    """Change one step, of one rank or, at the same place, of every rank; None if there is none."""
    size = len(parts)
    places = [(rank, path) for rank in range(size) for path in paths(parts[rank])]
    if not places:
        return None
    rank, path = random.choice(places)
    change = Change(random, size, count, step_at(parts[rank], path), buffers)
    everywhere = random.random() < 0.5
    mutant = list(parts)
    for r in range(size) if everywhere else (rank,):
        step = step_at(parts[r], path)
        if step is not None and change.kind == "swap":
            mutant[r] = swapped(parts[r], path)
        elif step is not None:
            mutant[r] = put(parts[r], path, change(step))
    who = "every rank" if everywhere else f"rank {rank}"
    return mutant, f"{change.what}, on {who} at {path}"


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
                    key = contract.length_key(rank, buffer, block, size, count)
                    if key not in self.lengths:
                        self.lengths[key] = 7 if equal else lengths.pop()
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
        return self.lengths[self.contract.length_key(rank, buffer, block, self.size, self.count)]

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
                ranks = c.contributions(rank, self.size)
                value = operation.reduce([self.values[r, block] for r in ranks])
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
        programs = [self._bind(b, parts[b.rank], x[b.rank], out[b.rank]) for b in backends]
        runs = [Run(polled(program), program) for program in programs]
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
        return Binder(backend, storage.memory, op, False).program(materialise(part), storage)

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


@dataclass
class Tally:
    """What became of the mutants of one algorithm."""

    label: str
    mutants: int = 0
    rejected: int = 0
    accepted: int = 0
    unseen: list[str] = field(default_factory=list)  # what was rejected, and no run has shown
    disagreements: list[str] = field(default_factory=list)

    def row(self) -> str:
        return (
            f"{self.label:36} {self.mutants:8} {self.rejected:10} {len(self.unseen):8} "
            f"{self.accepted:10} {len(self.disagreements):14}"
        )


HEADER = (
    f"{'algorithm':36} {'mutants':>8} {'rejected':>10} {'unseen':>8} {'equivalent':>10} "
    f"{'disagreements':>14}"
)


def settings(algorithm: Algorithm) -> Iterator[tuple[int, int, int, tuple]]:
    """Sizes, roots, arities and groups to try an algorithm with."""
    for size in SIZES:
        partitions = [(tuple(range(size)),)]
        if "groups" in algorithm.uses:
            halves = (tuple(range(size // 2)), tuple(range(size // 2, size)))
            odd_even = (tuple(range(0, size, 2)), tuple(range(1, size, 2)))
            partitions += [halves, odd_even, tuple((r,) for r in range(size))]
        for groups in partitions:
            if algorithm.unsupported(size, groups=groups) is not None:
                continue
            for root in range(size if "root" in algorithm.uses else 1):
                for arity in (2, 3) if "arity" in algorithm.uses else (2,):
                    yield size, root, arity, groups


class Subject:
    """One algorithm with one setting, written down, and the data to run it with."""

    def __init__(self, algorithm: Algorithm, size: int, root: int, arity: int, groups: tuple):
        self.algorithm, self.root = algorithm, root
        self.count = algorithm.block_count(size, groups=groups)
        self.parts = [
            write_down(algorithm.schedule(rank, size, root, arity, groups)) for rank in range(size)
        ]
        equal = algorithm.equal_blocks
        self.trial = Trial(algorithm.contract, size, root, self.count, equal)
        self.setting = f"size {size} root {root} arity {arity} groups {groups}"

    def proved(self, parts: list) -> str:
        """What the prover holds against a schedule, or nothing."""
        algorithm = self.algorithm
        machine = Machine(algorithm.contract, parts, self.root, self.count, algorithm.equal_blocks)
        try:
            machine.run()
        except ScheduleError as error:
            return str(error)
        return ""

    def ran(self, parts: list) -> str:
        """What a run shows to be wrong, or nothing; any error that is not ours is a crash."""
        try:
            self.trial.run(parts)
        except MpidistError as error:
            return f"{type(error).__name__}: {error}"
        return ""


class SharedSubject(Subject):
    """An algorithm in shared memory: it is run with the ranks' turns in many orders."""

    def __init__(self, algorithm: Algorithm, size: int, root: int, arity: int, groups: tuple):
        super().__init__(algorithm, size, root, arity, groups)
        self.groups, self.pieces = groups, 1
        if "pieces" in algorithm.uses and root % 2 == 0:
            self.pieces = 3
            self.count *= self.pieces
            self.parts = [
                write_down(algorithm.segmented(rank, size, self.pieces, root=root))
                for rank in range(size)
            ]
        contract = algorithm.contract
        calls = range(1, 4) if algorithm.memory.scratch else (1,)  # two sets of slots take turns
        self.inputs = [
            {
                (rank, block): 1 << rank
                if contract.idempotent
                else PRIMES[rank * self.count + block] ** call
                for rank in range(size)
                for block in range(self.count)
            }
            for call in calls
        ]

    def proved(self, parts: list) -> str:
        algorithm = self.algorithm
        machine = Machine(
            algorithm.contract,
            parts,
            self.root,
            self.count,
            memory=algorithm.memory,
            groups=self.groups,
        )
        try:
            machine.run()
        except ScheduleError as error:
            return str(error)
        return ""

    def ran(self, parts: list, orders: int = 16) -> str:
        contract = self.algorithm.contract
        combine = UNION.function if contract.idempotent else PRODUCT.function
        for seed in range(orders):
            run = Interleaving(
                contract,
                self.root,
                self.count,
                self.inputs,
                lambda a, b: combine(a, b, dtype=object),
                Random(seed),
                seed % 2,
            )
            try:
                run.check(parts)
            except MpidistError as error:
                return f"{type(error).__name__}: {error}"
        return ""


SEEN_BY_A_RUN = (
    "race",
    "ends with",
    "deadlock",
    "never written",
    "nothing was written",
    "contribution",
)


def judge_shared(algorithm: Algorithm, mutants: int, seed: int = 0, orders: int = 200) -> Tally:
    """Break an algorithm in shared memory `mutants` times."""
    random = Random(zlib.crc32(algorithm.label.encode()) + seed)
    tally = Tally(algorithm.label)
    subjects = [SharedSubject(algorithm, *each) for each in settings(algorithm)]
    for subject in subjects:
        for verdict in (subject.proved(subject.parts), subject.ran(subject.parts, 4)):
            if verdict:
                tally.disagreements.append(f"whole, {subject.setting}: {verdict}")
    while tally.mutants < mutants:
        subject = random.choice(subjects)
        mutant = mutate(random, subject.parts, subject.count, algorithm.memory.buffers)
        if mutant is None or mutant[0] == subject.parts:
            continue
        parts, what = mutant
        tally.mutants += 1
        proved = subject.proved(parts)
        if not proved:
            ran = subject.ran(parts)
            if ran:
                tally.disagreements.append(
                    f"{subject.setting}: {what}: prover: accepts; run: {ran}"
                )
            tally.accepted += not ran
            continue
        tally.rejected += 1
        if any(text in proved for text in SEEN_BY_A_RUN) and not _fails(subject, parts, orders):
            tally.unseen.append(f"{subject.setting}: {what}: prover: {proved}")
    return tally


def _fails(subject: SharedSubject, parts: list, orders: int) -> bool:
    try:
        return bool(subject.ran(parts, orders))
    except (ValueError, IndexError):  # unequal numbers of blocks, no peers
        return True


def judge(algorithm: Algorithm, mutants: int, seed: int = 0) -> Tally:
    """Break one algorithm `mutants` times."""
    random = Random(zlib.crc32(algorithm.label.encode()) + seed)
    tally = Tally(algorithm.label)
    subjects = [Subject(algorithm, *each) for each in settings(algorithm)]
    for subject in subjects:
        for verdict in (subject.proved(subject.parts), subject.ran(subject.parts)):
            if verdict:
                tally.disagreements.append(f"whole, {subject.setting}: {verdict}")
    subjects = [s for s in subjects if any(s.parts)]
    while subjects and tally.mutants < mutants:
        subject = random.choice(subjects)
        mutant = mutate(random, subject.parts, subject.count)
        if mutant is None or mutant[0] == subject.parts:
            continue
        parts, what = mutant
        tally.mutants += 1
        proved = subject.proved(parts)
        try:
            ran = subject.ran(parts)
        except Exception as error:  # the engine must not stumble over what a user wrote
            tally.disagreements.append(
                f"{subject.setting}: {what}: CRASH {type(error).__name__}: {error}; "
                f"prover: {proved or 'accepts'}"
            )
            continue
        if bool(proved) != bool(ran):
            tally.disagreements.append(
                f"{subject.setting}: {what}: prover: {proved or 'accepts'}; run: "
                f"{ran or 'is right'}"
            )
        elif proved:
            tally.rejected += 1
        else:
            tally.accepted += 1
    return tally


MIXED = ("hierarchical/in_place/ring", "hierarchical_leaders/published/ring")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="only algorithms whose label holds one of these")
    parser.add_argument("--mutants", type=int, default=2000, help="of each algorithm")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    begin, tallies = time.monotonic(), []
    print(HEADER)
    mixed = [find("allreduce", name).algorithm for name in MIXED]
    for algorithm in (*algorithms(one_sided=True), *mixed):
        if options.names and not any(name in algorithm.label for name in options.names):
            continue
        one = judge if algorithm.memory is None else judge_shared
        tallies.append(one(algorithm, options.mutants, options.seed))
        print(tallies[-1].row(), flush=True)
        for text in (*tallies[-1].disagreements[:5], *tallies[-1].unseen[:2]):
            print(f"    {text}")
    total = Tally(f"{len(tallies)} algorithms, {time.monotonic() - begin:.0f} s")
    for tally in tallies:
        total.mutants += tally.mutants
        total.rejected += tally.rejected
        total.accepted += tally.accepted
        total.unseen += tally.unseen
        total.disagreements += tally.disagreements
    print(total.row())
    return 1 if total.disagreements else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Break algorithms at random: what the prover says of each mutant must be what a run shows.

python tests/mutation.py                      # 2000 mutants of every algorithm
python tests/mutation.py --mutants 100 ring   # of those whose label holds "ring"
"""

from __future__ import annotations

import argparse
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import mpidist  # noqa: F401  (registers the algorithms)
from mpidist.errors import MpidistError, ScheduleError
from mpidist.schedule import Algorithm, algorithms
from mpidist.schedule.machine import Machine
from tests.support.mutants import Trial, mutate, write_down

SIZES = (2, 3, 4, 5, 6)


@dataclass
class Tally:
    """What became of the mutants of one algorithm."""

    label: str
    mutants: int = 0
    rejected: int = 0
    accepted: int = 0
    disagreements: list[str] = field(default_factory=list)

    def row(self) -> str:
        return (
            f"{self.label:36} {self.mutants:8} {self.rejected:10} {self.accepted:10} "
            f"{len(self.disagreements):14}"
        )


HEADER = (
    f"{'algorithm':36} {'mutants':>8} {'rejected':>10} {'equivalent':>10} {'disagreements':>14}"
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


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="only algorithms whose label holds one of these")
    parser.add_argument("--mutants", type=int, default=2000, help="of each algorithm")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    begin, tallies = time.monotonic(), []
    print(HEADER)
    for algorithm in algorithms():
        if options.names and not any(name in algorithm.label for name in options.names):
            continue
        tallies.append(judge(algorithm, options.mutants, options.seed))
        print(tallies[-1].row(), flush=True)
        for text in tallies[-1].disagreements[:5]:
            print(f"    {text}")
    total = Tally(f"{len(tallies)} algorithms, {time.monotonic() - begin:.0f} s")
    for tally in tallies:
        total.mutants += tally.mutants
        total.rejected += tally.rejected
        total.accepted += tally.accepted
        total.disagreements += tally.disagreements
    print(total.row())
    return 1 if total.disagreements else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

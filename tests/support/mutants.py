"""Broken algorithms, made at random: a schedule with a step dropped, doubled or changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

from mpidist.schedule.rounds import BUFFERS, Copy, Parallel, Recv, Reduce, block_tuple, steps_of

Path = tuple[int, ...]  # item, strand, item, strand, …, item, step


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


def paths(written: list, prefix: Path = ()) -> Iterator[Path]:
    """Where the steps are."""
    for i, item in enumerate(written):
        if isinstance(item, Parallel):
            for k, strand in enumerate(item.strands):
                yield from paths(strand, (*prefix, i, k))
        else:
            yield from ((*prefix, i, j) for j in range(len(item)))


def step_at(written: list, path: Path):
    """The step at a path; None if there is none."""
    try:
        while len(path) > 2:
            written, path = written[path[0]].strands[path[1]], path[2:]
        return written[path[0]][path[1]]
    except (IndexError, AttributeError, TypeError):
        return None


def put(written: list, path: Path, steps: tuple) -> list:
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

    def __init__(self, random: Random, size: int, count: int, step):
        kinds = ["drop", "drop", "blocks", "blocks", "blocks", "double", "buffer"]
        if not isinstance(step, Copy):
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
        if self.kind == "buffer":
            name = "target" if isinstance(step, Copy) else "buffer"
            other = BUFFERS[(BUFFERS.index(getattr(step, name)) + 1 + self.which % 2) % 3]
            return (replace(step, **{name: other}),)
        if self.kind == "kind" and isinstance(step, (Recv, Reduce)):
            other = Reduce if isinstance(step, Recv) else Recv
            return (other(step.peer, step.blocks, step.buffer),)
        if self.kind == "peer" and not isinstance(step, Copy):
            return (replace(step, peer=(step.peer + self.by) % self.size),)
        if isinstance(step, Copy):
            side = "source_blocks" if self.which % 2 else "target_blocks"
            return (replace(step, **{side: self._blocks(getattr(step, side))}),)
        return (replace(step, blocks=self._blocks(step.blocks)),)

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


def mutate(random: Random, parts: list[list], count: int) -> tuple[list[list], str] | None:
    """Change one step, of one rank or, at the same place, of every rank; None if there is none."""
    size = len(parts)
    places = [(rank, path) for rank in range(size) for path in paths(parts[rank])]
    if not places:
        return None
    rank, path = random.choice(places)
    change = Change(random, size, count, step_at(parts[rank], path))
    everywhere = random.random() < 0.5
    mutant = list(parts)
    for r in range(size) if everywhere else (rank,):
        step = step_at(parts[r], path)
        if step is not None:
            mutant[r] = put(parts[r], path, change(step))
    who = "every rank" if everywhere else f"rank {rank}"
    return mutant, f"{change.what}, on {who} at {path}"

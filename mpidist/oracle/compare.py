"""Comparison of the ranks with the reference, tensor by tensor, against rounding noise."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from .log import PHASES, Imprint, Log, Part, Step

FACTOR = 10.0  # noise times this is a difference
EXACT = ("gradients", "parameters", "optimizer")  # phases that reproducible= makes equal by bits
ULPS = 4.0  # as is a distance of so many units of the last place in every element
EPSILONS = {
    "float16": 2**-10,
    "bfloat16": 2**-7,
    "float32": 2**-23,
    "complex64": 2**-23,
    "exact": 0.0,
}
FEW = 64  # elements
Pair = tuple[int, Part, Part]  # a rank, its part of a tensor, and the reference's
FINEST = 1e-15  # relative; sketches are no more exact in float64


def epsilon(dtype: str) -> float:
    """Return the distance from 1 to the next number of a dtype, by its name; 0 for integers."""
    return EPSILONS.get(dtype, FINEST)


def distance(one: Part, other: Part) -> float:
    """Return the estimated norm of the difference of two tensors, from their sketches."""
    if one.value is not None and other.value is not None:
        found = abs(one.value - other.value)
    else:
        with np.errstate(all="ignore"):
            found = float(np.linalg.norm(one.sums - other.sums))
    return found if math.isfinite(found) else math.inf


@dataclass
class Difference:
    """A tensor that differs by more than noise; distances and norms are those of the worst rank."""

    phase: str
    imprint: Imprint  # the reference's
    ranks: list[int]  # that differ
    distance: float = 0.0
    noise: float = 0.0
    norm: float = 0.0  # of the reference
    missing: list[int] = field(default_factory=list)  # ranks without this tensor
    extra: bool = False  # whether it is the reference that does not have it
    exact: bool = False  # whether the bits were compared, as DDP(reproducible=) promises them

    @property
    def name(self) -> str:
        """Name of the tensor."""
        return self.imprint.name


@dataclass
class Row:
    """The verdict on a phase of a step."""

    step: int
    phase: str
    compared: int = 0
    differences: list[Difference] = field(default_factory=list)
    worst: float = 0.0  # largest distance, as a multiple of noise
    at: str = ""  # and the tensor that has it
    note: str = ""
    exact: bool = False  # whether the bits of all tensors were compared


class Runs:
    """The logs of all runs of a check, of each of their processes by number.

    `copies` says whether the reference has a process for each rank.
    """

    def __init__(
        self,
        ranks: Mapping[int, Log],
        reference: Mapping[int, Log],
        again: Mapping[int, Log],
        perturbed: Mapping[int, Log],
        copies: bool,
    ):
        self.ranks, self.copies = ranks, copies
        self.reference, self.again, self.perturbed = reference, again, perturbed

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @cached_property
    def microbatches(self) -> int:
        """Number of microbatches of a pipeline; 0 without one."""
        return max(log.facts.get("microbatches", 0) for log in self.ranks.values())

    @cached_property
    def shards(self) -> int:
        """Number of ranks among which a loader has divided the data; 0 if none has."""
        return max(log.facts.get("shards", 0) for log in self.ranks.values())

    def leader(self, rank: int) -> int:
        """Return the rank that has a rank's samples: of a pipeline, that of the first stage."""
        return int(self.ranks[rank].facts.get("leader", rank))

    @cached_property
    def leaders(self) -> list[int]:
        """The ranks that have samples."""
        return [rank for rank in self.ranks if self.leader(rank) == rank]

    def holders(self, phase: str, imprint: Imprint) -> list[int]:
        """Return the ranks that should have a tensor: of a pipeline, those of its stage."""
        if phase == "batch":
            return self.leaders
        if not self.microbatches or imprint.how == "loss":
            return list(self.ranks)
        name = imprint.name
        if imprint.how == "rows":
            # A traced stage has modules, too, that it never calls.
            return [rank for rank, log in self.ranks.items() if log.has(phase, name)]
        name = name.rpartition(".")[0] if phase == "optimizer" else name
        return [rank for rank, log in self.ranks.items() if name in log.facts.get("held", ())]

    def step_of(self, rank: int, number: int) -> Step | None:
        """Return a step of a rank."""
        return self.ranks[rank].step(number)

    def reference_step(
        self, number: int, rank: int = 0, run: Mapping[int, Log] | None = None
    ) -> Step | None:
        """Return a step of the reference, or of another run like it, for comparison with a rank."""
        logs = self.reference if run is None else run
        return logs[rank if self.copies else 0].step(number)

    def part(
        self,
        number: int,
        phase: str,
        name: str,
        rank: int,
        run: Mapping[int, Log] | None = None,
    ) -> Part | None:
        """Return what a rank's part of a tensor is in the reference, or in another run like it."""
        step = self.reference_step(number, rank, run)
        imprint = None if step is None else step.tensors.get(phase, {}).get(name)
        if imprint is None:
            return None
        if imprint.how == "rows" and not self.copies:
            return imprint.parts.get(self.leader(rank))
        return imprint.parts.get(rank if self.copies else 0)

    @cached_property
    def _noises(self) -> dict[tuple[str, str], dict[int, float]]:
        """Noise of an element of each tensor by phase and name, in each step: root mean squares."""
        found: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
        for rank, log in self.reference.items():
            for step in log.steps:
                perturbed = self.perturbed[rank].step(step.number)
                for phase, imprints in step.tensors.items():
                    for name, imprint in imprints.items():
                        others = {} if perturbed is None else perturbed.tensors
                        other = others.get(phase, {}).get(name)
                        for key, part in imprint.parts.items():
                            if other is None or key not in other.parts:
                                continue
                            noise = distance(part, other.parts[key]) / math.sqrt(
                                elements(imprint, part)
                            )
                            known = found[phase, name]
                            if math.isfinite(noise):
                                known[step.number] = max(known.get(step.number, 0.0), noise)
        return found

    @cached_property
    def _modules(self) -> dict[tuple[str, str], list[str]]:
        """The tensors whose noise is pooled: those of a module, in a phase."""
        found: dict[tuple[str, str], list[str]] = defaultdict(list)
        for phase, name in self._noises:
            found[phase, _module(phase, name)].append(name)
        return found

    def noise(self, number: int, phase: str, imprint: Imprint) -> float:
        """Return the noise of an element of a tensor, the largest of the steps so far.

        The few elements of a small tensor may by chance have none: they have the noise of the
        other tensors of their module, too.
        """
        names = [imprint.name]
        if math.prod(imprint.shape) < FEW and phase in ("gradients", "parameters", "optimizer"):
            names = self._modules.get((phase, _module(phase, imprint.name)), names)
        return max(
            (
                noise
                for name in names
                for k, noise in self._noises.get((phase, name), {}).items()
                if k <= number
            ),
            default=0.0,
        )

    def bits(self, number: int, phase: str, name: str, rank: int) -> int | None:
        """Return the hash of the bits that a rank should have; None if it is not recorded."""
        step = self.reference_step(number, rank)
        found = step.tensors.get(phase, {}).get(name) if step is not None else None
        return None if found is None else found.hash

    def unit(self, number: int, phase: str, imprint: Imprint, part: Part, norm: float) -> float:
        """Return the noise of a part of a tensor; :data:`FACTOR` times this is a difference."""
        noise = self.noise(number, phase, imprint) * math.sqrt(elements(imprint, part))
        return noise + ULPS / FACTOR * epsilon(imprint.dtype or "float32") * norm


def elements(imprint: Imprint, part: Part) -> int:
    """Return the number of elements of a part of a tensor."""
    return max(math.prod(imprint.shape) * max(part.rows, 1), 1)


def _module(phase: str, name: str) -> str:
    """Return the module of a tensor; of an optimizer's state with the name of the entry."""
    if phase == "optimizer":
        inner, _, key = name.rpartition(".")
        return f"{inner.rpartition('.')[0]}:{key}"
    return name.rpartition(".")[0]


def rows(runs: Runs) -> Iterator[Row]:
    """Yield the verdicts, phase by phase, up to the end of the first step that differs."""
    last = max((step.number for log in runs.ranks.values() for step in log.steps), default=0)
    logs = runs.ranks.values()
    if any("failed" in log.facts for log in logs):
        # The others are killed wherever they are: what these have not recorded is no difference.
        killed = [log for log in logs if not log.facts.keys() & {"failed", "ended", "done"}]
        last = min([last, *(max((s.number for s in log.steps), default=0) for log in killed)])
    for number in range(1, last + 1):
        differs = False
        for phase in PHASES:
            row = compare(runs, number, phase)
            if row is not None:
                differs |= bool(row.differences)
                yield row
        if differs:
            return


def compare(runs: Runs, number: int, phase: str) -> Row | None:
    """Compare a phase of a step; None if there is nothing of it."""
    if phase == "start":
        return _compare_start(runs) if number == 1 else None
    if phase == "batch":
        return _compare_batch(runs, number)
    row = Row(number, phase, exact=phase in EXACT)
    names: dict[str, Imprint] = {}
    for log in (*runs.reference.values(), *runs.ranks.values()):
        step = log.step(number)
        for name, imprint in (step.tensors.get(phase, {}) if step is not None else {}).items():
            names.setdefault(name, imprint)
            # Of ranks that shard a tensor, though one process does not; and not of a missing one.
            if imprint.how == "part" or not names[name].parts:
                names[name] = imprint
    for imprint in names.values():
        _compare_tensor(runs, row, imprint)
    return row if row.compared or row.differences else None


def _compare_tensor(runs: Runs, row: Row, imprint: Imprint) -> None:
    """Compare a tensor on all ranks with the reference, and note it in the row."""
    name, found = imprint.name, Difference(row.phase, imprint, [])
    holders = runs.holders(row.phase, imprint)
    mine: dict[int, Imprint] = {}
    for rank in runs.ranks:
        step = runs.step_of(rank, row.step)
        if step is not None and (step.stepped or (row.phase == "forward" and not step.batches)):
            known = step.tensors.get(row.phase, {}).get(name)
            if known is not None and rank in known.parts:
                mine[rank] = known
            elif imprint.how not in ("part", "some") and _has_phase(step, row.phase):
                found.missing += [rank] if rank in holders else []
    expected = {rank: runs.part(row.step, row.phase, name, rank) for rank in runs.ranks}
    bits = {rank: runs.bits(row.step, row.phase, name, rank) for rank in runs.ranks}
    if imprint.how == "rows":
        # A rank without samples has none.
        found.missing = [rank for rank in found.missing if expected[rank] is not None]
        layouts = {known.layout for known in mine.values()} | {imprint.layout}
        if len(layouts) > 1:
            return
    if all(part is None for part in expected.values()):
        if mine and _has_phase(runs.reference_step(row.step), row.phase):
            found.extra, found.ranks, found.missing = True, list(mine), []
            row.differences.append(found)
        return
    row.compared += 1
    pairs: list[Pair]
    if imprint.how == "loss":
        pairs = _losses(mine, expected)
    elif imprint.how == "part":
        pairs = _sums(mine, expected)
    else:
        pairs = [
            (rank, known.parts[rank], part)
            for rank, known in mine.items()
            if (part := expected[rank]) is not None
        ]
    found.exact = row.phase in EXACT and any(each is not None for each in bits.values())
    row.exact &= found.exact
    for rank, one, other in pairs:
        norm = math.sqrt(other.squares)
        apart = distance(one, other)
        unit = runs.unit(row.step, row.phase, imprint, other, norm)
        times = apart / unit if unit else (math.inf if apart else 0.0)
        if times > row.worst and times <= FACTOR:
            row.worst, row.at = times, name
        same = rank not in mine or not found.exact or mine[rank].hash == bits.get(rank)
        if times > FACTOR or not math.isfinite(apart) or not same:
            found.ranks.append(rank)
            if apart >= found.distance:
                found.distance, found.noise, found.norm = apart, unit, norm
    if imprint.how in ("loss", "part") and found.ranks:
        found.ranks = list(mine)
    if found.missing:
        found.ranks = sorted({*found.ranks, *found.missing})
    if found.ranks:
        row.differences.append(found)


def _has_phase(step: Step | None, phase: str) -> bool:
    return step is not None and bool(step.tensors.get(phase))


def _sums(mine: Mapping[int, Imprint], expected: Mapping[int, Part | None]) -> list[Pair]:
    """Return the sum of the shards beside the whole tensor."""
    whole = next(part for part in expected.values() if part is not None)
    total = Part(np.zeros_like(whole.sums), 0.0)
    for rank, known in mine.items():
        total = total + known.parts[rank]
    return [(0, total, whole)]


def _losses(mine: Mapping[int, Imprint], expected: Mapping[int, Part | None]) -> list[Pair]:
    """Return the loss of all ranks beside the reference's: the mean, or the sum if that is nearer.

    A script may add its samples' losses, and divide the gradients itself.
    """
    known = {id(part): part for part in expected.values() if part is not None}
    theirs = [part.value or 0.0 for part in known.values()]
    ours = [imprint.parts[rank].value or 0.0 for rank, imprint in mine.items()]
    if not ours:
        return []
    wanted = sum(theirs) / len(theirs)
    value = min((sum(ours) / len(ours), sum(ours)), key=lambda found: abs(found - wanted))
    nothing = np.zeros(1)
    return [(0, Part(nothing, 0, 0, value), Part(nothing, wanted * wanted, 0, wanted))]


def _compare_start(runs: Runs) -> Row | None:
    """Compare the parameters before the first step with those of rank 0.

    Those of a pipeline's stage are compared with the first rank that has it.
    """
    row = Row(1, "start")
    known: dict[str, tuple[int, Imprint]] = {}
    for rank in runs.ranks if runs.microbatches else (0,):
        step = runs.step_of(rank, 1)
        for name, imprint in (step.tensors.get("start", {}) if step is not None else {}).items():
            known.setdefault(name, (rank, imprint))
    for name, (first, imprint) in known.items():
        whole = imprint.parts[first]
        found = Difference("start", imprint, [], norm=math.sqrt(whole.squares))
        for rank in runs.holders("start", imprint):
            step = runs.step_of(rank, 1)
            if step is None or not _has_phase(step, "start"):
                continue
            other = step.tensors["start"].get(name)
            if other is None:
                found.missing.append(rank)
            elif other.hash != imprint.hash:
                found.ranks.append(rank)
                found.distance = max(found.distance, distance(other.parts[rank], whole))
        row.compared += 1
        if found.ranks or found.missing:
            found.ranks = sorted({*found.ranks, *found.missing})
            row.differences.append(found)
    if any("start" in log.facts for log in runs.reference.values()) and not row.differences:
        whose = "those of each stage" if runs.microbatches else "rank 0's"
        row.note = f"the reference takes {whose}: the script draws others as one process"
    return row if row.compared else None


def samples(runs: Runs, rank: int, number: int) -> Counter[int]:
    """Return the samples of a rank in a step."""
    step = runs.step_of(rank, number)
    return Counter() if step is None else Counter(step.samples.tolist())


def reference_samples(runs: Runs, number: int) -> Counter[int]:
    """Return the samples of the reference in a step, those of all copies."""
    found: Counter[int] = Counter()
    for log in runs.reference.values():
        step = log.step(number)
        if step is not None:
            found.update(step.samples.tolist())
    return found


def _compare_batch(runs: Runs, number: int) -> Row | None:
    """Compare the samples of all ranks in a step with those of the reference."""
    here = {rank: samples(runs, rank, number) for rank in runs.leaders}
    wanted = reference_samples(runs, number)
    union = sum(here.values(), Counter())
    if not union and not wanted:
        return None
    counts = [sum(each.values()) for each in here.values()]
    even = len(set(counts)) == 1
    text = f"{len(counts)} × {counts[0]}" if even else " + ".join(map(str, counts))
    row = Row(number, "batch", sum(counts))
    same = union == wanted
    row.note = f"{text} samples {'=' if same else 'against'} the reference's {wanted.total()}"
    if not same:
        more = [rank for rank, each in here.items() if each - wanted]
        more = more or [rank for rank in here if _shares(here, rank, wanted)]
        more = more or [rank for rank, each in here.items() if not each] or list(here)
        row.differences.append(Difference("batch", Imprint("samples", "rows"), more))
    elif behind := behind_in(runs, number):
        row.note += ", several batches before a step"
        row.differences.append(Difference("batch", Imprint("steps", "whole"), behind))
    elif others := _with_other_targets(runs, number):
        row.note += ", the targets are not"
        row.differences.append(Difference("batch", Imprint("targets", "rows"), others))
    return row


def behind_in(runs: Runs, number: int) -> list[int]:
    """Return the ranks of a pipeline that had more batches in a step than others."""
    steps = {rank: runs.step_of(rank, number) for rank in runs.ranks}
    counts = {rank: step.batches for rank, step in steps.items() if step is not None}
    least = min(counts.values(), default=0)
    return [rank for rank, count in counts.items() if least and count > least]


def _with_other_targets(runs: Runs, number: int) -> list[int]:
    """Return the ranks of a pipeline's last stage that have targets of other samples."""
    log = runs.reference_step(number)
    wanted = {pair for part in ([] if log is None else log.pairs) for pair in part.tolist()}
    found = []
    for rank in runs.ranks if wanted else ():
        step = runs.step_of(rank, number)
        pairs = [] if step is None else step.pairs
        if any(pair not in wanted for part in pairs for pair in part.tolist()):
            found.append(rank)
    return found


def _shares(here: Mapping[int, Counter[int]], rank: int, wanted: Counter[int]) -> bool:
    """Return whether a rank has samples that another rank has, too, unlike the reference."""
    rest = wanted - here[rank]
    return any((here[rank] & each) - rest for other, each in here.items() if other != rank)


def nondeterministic(runs: Runs) -> tuple[Row, str] | None:
    """Return where two runs of the reference first differ, by more than noise, or None."""
    for number in range(1, 1 + max(len(log.steps) for log in runs.reference.values())):
        if reference_samples(runs, number) != reference_samples(
            Runs(runs.ranks, runs.again, runs.again, runs.again, runs.copies), number
        ):
            return Row(number, "batch"), "samples"
        for phase in PHASES[2:]:
            for rank in range(runs.size if runs.copies else 1):
                step = runs.reference_step(number, rank)
                for name, imprint in (step.tensors.get(phase, {}) if step else {}).items():
                    if _unlike(runs, number, phase, imprint, rank):
                        return Row(number, phase), name
    return None


def _unlike(runs: Runs, number: int, phase: str, imprint: Imprint, rank: int) -> bool:
    step = runs.reference_step(number, rank, runs.again)
    other = None if step is None else step.tensors.get(phase, {}).get(imprint.name)
    if other is None or imprint.parts.keys() != other.parts.keys():
        return True
    for key, part in imprint.parts.items():
        unit = runs.unit(number, phase, imprint, part, math.sqrt(part.squares))
        if distance(part, other.parts[key]) > FACTOR * unit:
            return True
    return False

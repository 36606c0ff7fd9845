"""Rules of diagnosis: the likely cause of the first difference, from what the runs recorded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from ..measure import counted, plural
from .compare import (
    FACTOR,
    Difference,
    Row,
    Runs,
    behind_in,
    compare,
    distance,
    epsilon,
    reference_samples,
    samples,
)
from .log import Imprint, Part

RULES: list[Callable[[Evidence], str | None]] = []
"""The rules in the order in which they are asked; the first that returns a text has the cause."""

HALVES = {"bfloat16": 2**-9, "float16": 2**-12}  # typical relative rounding errors


def rule(ask: Callable[[Evidence], str | None]) -> Callable[[Evidence], str | None]:
    """Register a rule: a function of the :class:`Evidence` that returns a cause, or None."""
    RULES.append(ask)
    return ask


@dataclass
class Evidence:
    """The first phase that differs, with the logs of all runs."""

    runs: Runs
    row: Row

    @property
    def first(self) -> Difference:
        """The first tensor that differs."""
        return self.row.differences[0]

    @property
    def alone(self) -> bool:
        """Whether only some of the ranks differ."""
        return len(self.first.ranks) < len(self.holders(self.first))

    @property
    def replicas(self) -> int:
        """Number of ranks that divide a batch."""
        return len(self.runs.leaders)

    def holders(self, found: Difference) -> list[int]:
        """Return the ranks that should have a tensor."""
        return self.runs.holders(found.phase, found.imprint)

    def imprint(self, rank: int, phase: str, name: str) -> Imprint | None:
        """Return what a rank recorded of a tensor in this step."""
        step = self.runs.step_of(rank, self.row.step)
        return None if step is None else step.tensors.get(phase, {}).get(name)

    def parts(self, found: Difference) -> dict[int, Part]:
        """Return the parts of all ranks of a tensor that differs."""
        every = {rank: self.imprint(rank, found.phase, found.name) for rank in self.runs.ranks}
        return {k: each.parts[k] for k, each in every.items() if each and k in each.parts}

    def wanted(self, found: Difference, rank: int = 0) -> Part | None:
        """Return what the reference has of it."""
        return self.runs.part(self.row.step, found.phase, found.name, rank)

    def close(self, found: Difference, one: Part, other: Part) -> bool:
        """Return whether two values of a tensor that differs are equal but for noise."""
        norm = math.sqrt(max(one.squares, other.squares))
        unit = self.runs.unit(self.row.step, found.phase, found.imprint, other, norm)
        return distance(one, other) <= FACTOR * unit

    def alike(self, found: Difference) -> bool:
        """Return whether all ranks have the same value of a tensor."""
        parts = list(self.parts(found).values())
        return len(parts) == len(self.holders(found)) and all(
            self.close(found, part, parts[0]) for part in parts[1:]
        )

    def mean(self, found: Difference) -> Part | None:
        """Return the mean of a tensor over the ranks; those without it count as zero."""
        parts = list(self.parts(found).values())
        if not parts:
            return None
        return _scaled(sum(parts[1:], parts[0]), 1 / len(self.holders(found)))

    def factor(self, found: Difference) -> float | None:
        """Return c if the tensor is c times the reference's on all ranks, else None."""
        parts, whole = list(self.parts(found).values()), self.wanted(found)
        if not parts or whole is None or (found.imprint.how != "part" and not self.alike(found)):
            return None
        part = sum(parts[1:], parts[0]) if found.imprint.how == "part" else parts[0]
        squares = float(whole.sums @ whole.sums)
        if part.value is not None and whole.value:
            return part.value / whole.value
        if not squares or not math.isfinite(part.squares):
            return None
        c = float(part.sums @ whole.sums) / squares
        # The noise of c times a tensor is c times its noise.
        unit = self.runs.unit(
            self.row.step, found.phase, found.imprint, whole, math.sqrt(whole.squares)
        )
        rest = float(np.linalg.norm(part.sums - c * whole.sums))
        return c if rest <= FACTOR * unit * max(abs(c), 1) else None

    def site(self, which: str) -> str:
        """Return ``" (train.py:41)"``: where the first rank that differs called it."""
        step = self.runs.step_of(self.first.ranks[0], self.row.step)
        place = "" if step is None else step.sites.get(which, "")
        return f" ({place})" if place else ""


def _scaled(part: Part, c: float) -> Part:
    value = None if part.value is None else c * part.value
    return Part(c * part.sums, c * c * part.squares, part.rows, value)


def named(ranks: Iterable[int]) -> str:
    """Return ``"rank 1"`` or ``"ranks 0, 2"``."""
    ranks = list(ranks)
    return f"{plural(len(ranks), 'rank')} {', '.join(map(str, ranks))}"


def likely(runs: Runs, row: Row) -> str:
    """Return the likely cause of the differences in a row; "" if no rule knows one."""
    evidence = Evidence(runs, row)
    return next((text for ask in RULES if (text := ask(evidence))), "")


# -- samples --------------------------------------------------------------------------------------


@rule
def skipped_step(evidence: Evidence) -> str | None:
    """Find ranks that took the samples of two steps before an optimizer's step."""
    runs, number = evidence.runs, evidence.row.step
    if evidence.row.phase != "batch":
        return None
    counts = {rank: samples(runs, rank, number).total() for rank in runs.leaders}
    if behind := behind_in(runs, number):
        return (
            f"{named(behind)} skipped the optimizer's step {number}: had the next batch of the "
            "pipeline before it; each rank steps an optimizer of its own stage's parameters"
        )
    absent = [rank for rank in runs.ranks if runs.step_of(rank, number) is None]
    for rank in absent:
        if "failed" in runs.ranks[rank].facts:
            return f"the script failed on rank {rank}: {runs.ranks[rank].facts['failed']}"
    again = [rank for rank, count in counts.items() if rank not in absent and not count]
    if again and len(again) < runs.size:
        return (
            f"{named(again)} made the optimizer's step {number} without samples: called step() "
            "twice, or had none left"
        )
    if absent and len(absent) < runs.size:
        return (
            f"{named(absent)} did not come to the end of step {number}: skipped the optimizer's "
            "step, or had no samples"
        )
    least = min(counts.values())
    behind = [rank for rank, count in counts.items() if least and count >= 2 * least]
    if not behind or len(behind) == runs.size:
        return None
    return (
        f"{named(behind)} skipped the optimizer's step {number}: had the samples of more than one "
        "step when it came"
    )


@rule
def not_dealt_as_microbatches(evidence: Evidence) -> str | None:
    """Find data that is divided in another way than ``reproducible=`` needs it."""
    facts = evidence.runs.ranks[0].facts
    count = facts.get("reproducible", 0)
    if evidence.row.phase != "batch" or not count or facts.get("dealt"):
        return None
    return (
        f"reproducible={count} needs the same microbatches on any number of ranks: divide the data "
        f"by md.shard(data, comm, microbatches={count})"
    )


@rule
def same_samples(evidence: Evidence) -> str | None:
    """Find ranks that train on each other's samples."""
    runs, number = evidence.runs, evidence.row.step
    if evidence.row.phase != "batch":
        return None
    here = {rank: samples(runs, rank, number) for rank in runs.leaders}
    same: list[int] = []
    for rank, mine in here.items():
        if any(mine and mine == other for k, other in here.items() if k != rank):
            same.append(rank)
    if not same:
        return None
    if len(same) == len(here) and here[same[0]] == reference_samples(runs, number):
        return (
            "every rank trains on all samples of the reference: divide the data, by md.shard or a "
            "DistributedSampler"
        )
    return (
        f"{named(same)} train on the same samples: the data is not divided, or by a wrong rank and "
        "size; md.shard(data, comm) divides it"
    )


@rule
def divided_among_stages(evidence: Evidence) -> str | None:
    """Find data that is divided among all ranks of a pipeline, not among its replicas."""
    runs = evidence.runs
    if evidence.row.phase != "batch" or not runs.microbatches:
        return None
    if runs.shards <= len(runs.leaders) or evidence.first.name == "steps":
        return None
    return (
        f"the data is divided among {runs.shards} ranks, but all ranks of a pipeline need the same "
        f"batch: divide it among {counted(len(runs.leaders), 'replica')}, by md.shard(data, "
        "grid.data)"
    )


@rule
def other_targets(evidence: Evidence) -> str | None:
    """Find a pipeline whose last stage has the targets of other samples than its first one."""
    if evidence.row.phase != "batch" or evidence.first.name != "targets":
        return None
    return (
        f"the targets on {named(evidence.first.ranks)} are not those of the inputs on "
        f"{named(evidence.runs.leaders)}: give step() the same batch on all ranks of a pipeline; "
        "a seed that depends on the rank, or md.shard over its ranks, makes others"
    )


def _has_more(evidence: Evidence) -> bool:
    """Return whether the ranks have all samples of the reference in this step, and others, too."""
    runs, number = evidence.runs, evidence.row.step
    union: Counter[int] = Counter()
    for rank in runs.ranks:
        union += samples(runs, rank, number)
    wanted = reference_samples(runs, number)
    return bool(wanted) and wanted <= union


@rule
def other_order(evidence: Evidence) -> str | None:
    """Find ranks that have their samples in another order than the reference."""
    runs, number = evidence.runs, evidence.row.step
    if evidence.row.phase != "batch":
        return None
    steps = {step.number for log in runs.reference.values() for step in log.steps}
    theirs = {k: reference_samples(runs, k) for k in steps}
    if _has_more(evidence):
        return None
    for rank in evidence.first.ranks:
        mine = samples(runs, rank, number)
        for k, wanted in theirs.items():
            if k != number and mine and mine <= wanted:
                return (
                    f"another order of the samples: those of rank {rank} in step {number} are the "
                    f"reference's in step {k}; the seed of the order, or set_epoch(), must be the "
                    "same on all ranks"
                )
    return None


@rule
def other_samples(evidence: Evidence) -> str | None:
    """Say that the samples are not the reference's, for a reason that the samples do not show."""
    runs, number = evidence.runs, evidence.row.step
    if evidence.row.phase != "batch":
        return None
    wanted = reference_samples(runs, number)
    if _has_more(evidence):
        return (
            "one process has fewer samples in a step than the ranks together: the script divides "
            "its data itself, so nothing after this can be compared; expected md.shard or a "
            "DistributedSampler, or a batch that is divided among the ranks"
        )
    if evidence.alone:
        own = {rank: samples(runs, rank, number) for rank in evidence.first.ranks}
        count = sum((mine & wanted).total() for mine in own.values())
        total = sum(mine.total() for mine in own.values())
        return (
            f"{count} of the {total} samples of {named(own)} are the reference's: another order "
            "there (a seed that depends on the rank, set_epoch() not called alike), or random "
            "augmentation"
        )
    if not any(samples(runs, rank, number) & wanted for rank in runs.ranks):
        return (
            "no sample is the reference's: the data depends on the rank (its own seed, file or "
            "augmentation) or on their number, so nothing after this can be compared"
        )
    return (
        "some samples are not the reference's: drawn or augmented at random on each rank, or "
        "divided in another way than by md.shard or a DistributedSampler"
    )


# -- start ----------------------------------------------------------------------------------------


@rule
def unlike_replicas(evidence: Evidence) -> str | None:
    """Say that the replicas differ before the first step."""
    if evidence.row.phase != "start":
        return None
    return (
        f"the replicas differ before the first step: {named(evidence.first.ranks)} did not get the "
        "values of rank 0 (init_sync=False, no DDP, or changed after it was made)"
    )


# -- forward --------------------------------------------------------------------------------------


def _is_output(evidence: Evidence) -> bool:
    return evidence.row.phase == "forward" and evidence.first.imprint.how == "rows"


@rule
def batch_statistics(evidence: Evidence) -> str | None:
    """Find batch normalisation with the statistics of each rank's own samples."""
    found = evidence.first.imprint
    if not _is_output(evidence) or found.trait != "batch statistics":
        return None
    if evidence.runs.microbatches:
        return (
            f"{found.kind} normalises by the mean and variance of each microbatch's samples, the "
            "reference by those of the batch: so it is in pipelines; LayerNorm or GroupNorm do not "
            "depend on the other samples"
        )
    return (
        f"{found.kind} normalises by the mean and variance of each rank's own samples: "
        "mpidist.torch.SyncBatchNorm takes those of all ranks; if it is meant so, this is no fault"
    )


@rule
def dropout(evidence: Evidence) -> str | None:
    """Find dropout, whose masks are other ones on N ranks."""
    found = evidence.first.imprint
    if not _is_output(evidence):
        return None
    if found.trait == "dropout":
        return (
            f"{found.kind} is on, and its mask depends on the place in the batch and the rank's "
            "generator: check with p=0, where the rest can be compared"
        )
    drawn = [rank for rank in evidence.runs.ranks if _drew(evidence, rank)]
    if not drawn:
        return None
    return (
        f"random numbers are drawn in forward, on {named(drawn)} (dropout, noise): check without "
        "them, where the rest can be compared"
    )


def _drew(evidence: Evidence, rank: int) -> bool:
    step = evidence.runs.step_of(rank, evidence.row.step)
    return step is not None and step.random


@rule
def other_forward(evidence: Evidence) -> str | None:
    """Say that a module computes something else from equal samples and parameters."""
    if not _is_output(evidence):
        return None
    where = f"on {named(evidence.first.ranks)}" if evidence.alone else "on every rank"
    how = "depends on the rank" if evidence.alone else "depends on the whole batch, or on the size"
    if evidence.runs.microbatches and not evidence.alone:
        where, how = f"on {named(evidence.first.ranks)}", "depends on the rest of the microbatch"
    return f"{evidence.first.imprint.kind} computes something else {where}: its result {how}"


# -- loss -----------------------------------------------------------------------------------------


def _is_loss(evidence: Evidence) -> bool:
    return evidence.row.phase == "forward" and evidence.first.imprint.how == "loss"


def powers(size: int) -> dict[float, str]:
    """Return the factors by which gradients are wrong when they are averaged too often or never."""
    return {float(size): "N", 1 / size: "1/N", float(size**2): "N²", 1 / size**2: "1/N²"}


def _power(c: float | None, size: int) -> str | None:
    if c is None or size == 1:
        return None
    return next((name for p, name in powers(size).items() if abs(c / p - 1) < 0.01), None)


def _uneven(evidence: Evidence) -> str | None:
    """Return the numbers of samples of the ranks in this step if they are unequal."""
    runs = evidence.runs
    counts = [samples(runs, rank, evidence.row.step).total() for rank in runs.leaders]
    return ", ".join(map(str, counts)) if len(set(counts)) > 1 else None


@rule
def uneven_batches(evidence: Evidence) -> str | None:
    """Find ranks with unequal numbers of samples, whose means are averaged."""
    counts = _uneven(evidence)
    loss = _is_loss(evidence) or evidence.row.phase == "gradients"
    if not loss or counts is None or _power(evidence.factor(evidence.first), evidence.replicas):
        return None
    return (
        f"the ranks have {counts} samples: the mean of their means weights samples unequally; "
        'uneven="drop" leaves the last ones out, or divide a sum by the size of the whole batch'
    )


@rule
def added_microbatches(evidence: Evidence) -> str | None:
    """Find a pipeline whose loss or gradients are M times, or 1/M times, the reference's."""
    many, found = evidence.runs.microbatches, evidence.first
    if many < 2 or not (_is_loss(evidence) or evidence.row.phase == "gradients"):
        return None
    c, times, of = evidence.factor(found), "M times", ""
    count = evidence.replicas
    if c and count > 1 and _is_loss(evidence) and abs(c / many / count - 1) < 0.01:
        # A declared sum is divided by the samples of a replica's batch.
        c, times, of = many, "M × N times", f" and N = {count} replicas"
    if c is None or min(abs(c / many - 1), abs(c * many - 1)) > 0.01:
        return None
    if not _is_loss(evidence) and _power(c, evidence.replicas):
        return None  # with as many replicas: the loss would be M times, too
    what = "the loss" if _is_loss(evidence) else f"the gradient of {found.name}"
    if c < 1:
        return (
            f"{what} is 1/M times the reference's, for M = {many} microbatches"
            f"{evidence.site('backward')}: the loss function divides by the number of "
            "microbatches, which step() does, too"
        )
    return (
        f"{what} is {times} the reference's, for M = {many} microbatches{of}"
        f"{evidence.site('backward')}: those of the microbatches are added, not averaged; the loss "
        "function returns their mean, and declares a sum (reduction)"
    )


@rule
def scaled_loss(evidence: Evidence) -> str | None:
    """Find a loss that is a multiple of the reference's."""
    if not _is_loss(evidence):
        return None
    ours, wanted = evidence.parts(evidence.first), evidence.wanted(evidence.first)
    values = [part.value or 0.0 for part in ours.values()]
    whole = evidence.runs.copies and [
        part.value or 0.0
        for rank in evidence.runs.ranks
        if (part := evidence.wanted(evidence.first, rank)) is not None
    ]
    base = sum(whole) / len(whole) if whole else (wanted.value if wanted is not None else None)
    c = sum(values) / len(values) / base if values and base else None
    power = _power(c, evidence.replicas)
    if power is None:
        return None
    return (
        f"the loss is {power} times the reference's{evidence.site('backward')}: it is scaled by "
        "the number of ranks, and DDP averages the gradients by itself"
    )


@rule
def global_loss(evidence: Evidence) -> str | None:
    """Say that a loss is no mean over the samples, or of other targets."""
    if not _is_loss(evidence):
        return None
    found, ours = evidence.first, evidence.parts(evidence.first)
    theirs = {rank: evidence.wanted(found, rank) for rank in ours}
    wrong = [k for k, one in theirs.items() if one and not evidence.close(found, ours[k], one)]
    if evidence.runs.copies and wrong:  # each has the same batch as its rank
        return (
            f"the outputs are equal, the loss of {named(wrong)} is not{evidence.site('backward')}: "
            "the targets are those of other samples, or the loss depends on the rank"
        )
    return (
        f"the outputs are equal, the loss is not{evidence.site('backward')}: it is no mean over "
        "the samples but depends on which of them are together, as a contrastive loss does; gather "
        "the outputs of all ranks for it, or take each rank's loss as meant so; or the targets on "
        "a rank are those of other samples"
    )


# -- gradients ------------------------------------------------------------------------------------


@rule
def other_bits(evidence: Evidence) -> str | None:
    """Find what is equal but for rounding, where ``reproducible=`` promises the same bits."""
    found = evidence.first
    if not found.exact or found.missing or found.extra:
        return None
    if found.distance > FACTOR * found.noise:
        return None
    if evidence.row.phase == "gradients":
        return (
            "equal but for rounding, where reproducible= promises the same bits: the gradients "
            "were changed by something that depends on the number of ranks, or a microbatch was "
            "computed in another way (other threads, another shape of its batch)"
        )
    return (
        "equal but for rounding, where reproducible= promises the same bits: the gradients have "
        f"the same, the optimizer's step{evidence.site('step')} depends on the number of ranks"
    )


@rule
def no_state(evidence: Evidence) -> str | None:
    """Find ranks whose optimizer lacks parameters, or what it has to know of them."""
    if evidence.row.phase not in ("gradients", "parameters", "optimizer"):
        return None
    for phase in ("gradients", "optimizer"):
        row = compare(evidence.runs, evidence.row.step, phase)
        for found in row.differences if row is not None else ():
            if not found.missing or found.extra or len(found.missing) == evidence.runs.size:
                continue
            if phase == "gradients" and _none(evidence, found):
                continue
            return (
                f"the optimizer of {named(found.missing)} has no {found.name}: it was made with "
                "other parameters there, or its state was not loaded"
            )
    return None


def _none(evidence: Evidence, found: Difference) -> bool:
    """Return whether a missing gradient is one that is None on a rank that has the parameter."""
    return all(evidence.imprint(rank, found.phase, found.name) for rank in found.missing)


@rule
def zero_gradient(evidence: Evidence) -> str | None:
    """Find gradients that are zero, or None, where the reference's are not."""
    if evidence.row.phase != "gradients":
        return None
    found, parts = evidence.first, evidence.parts(evidence.first)
    wanted = evidence.wanted(found)
    if found.extra or wanted is None or not wanted.squares:
        return None
    zero = [rank for rank in found.ranks if rank not in parts or not parts[rank].squares]
    if found.imprint.how == "part":
        zero = [] if any(part.squares for part in parts.values()) else found.ranks
    if not zero:
        return None
    also = len(evidence.row.differences) - 1
    more = f" (and of {counted(also, 'other tensor')})" if also else ""
    what = "None" if all(rank not in parts for rank in zero) else "zero"
    return (
        f"the gradient of {found.name}{more} is {what} on {named(zero)}: the parameter is unused "
        "or detached there, or its gradient was set after backward"
    )


@rule
def kept_gradient(evidence: Evidence) -> str | None:
    """Find gradients that contain those of the step before, which were not set to zero."""
    found, number = evidence.first, evidence.row.step
    wanted = evidence.wanted(found)
    if evidence.row.phase != "gradients" or found.imprint.how == "part" or wanted is None:
        return None
    size, parts = len(evidence.holders(found)), evidence.parts(found)
    keeping: set[int] = set()
    for rank in found.ranks:
        # The last step that used it: one of other optimizers may be between.
        before = (evidence.runs.step_of(rank, k) for k in range(number - 1, 0, -1))
        last = next((k for k in before if k and found.name in k.tensors.get("gradients", {})), None)
        past = last and last.tensors["gradients"][found.name].parts.get(rank)  # None: no gradient
        if not last or not past or rank not in parts:
            return None
        # Sketches are linear: that of a sum is the sum of theirs.  Averaged over N ranks, of which
        # k keep theirs, the gradients of all contain k/N of those before.
        norm = float(past.sums @ past.sums)  # of the sketch: that of the tensor is not as exact
        c = float((parts[rank].sums - wanted.sums) @ past.sums) / norm if norm else 0.0
        k = round(c * size) if np.isfinite(c) else 0
        if not 0 < k <= size or not evidence.close(
            found, parts[rank], wanted + _scaled(past, k / size)
        ):
            return None
        keeping.add(k)
        earlier = last.number
    alone = keeping == {size}
    if not alone and (len(keeping) > 1 or evidence.alone):
        return None
    where = named(found.ranks) if alone else f"{keeping.pop()} of {size} ranks"
    return (
        f"the gradients contain those of step {earlier}, too, on {where}: they are not set to "
        f"zero there before backward; optimizer.zero_grad() is missing{evidence.site('step')}"
    )


@rule
def scaled_gradient(evidence: Evidence) -> str | None:
    """Find gradients that are N, 1/N or N² times the reference's."""
    if evidence.row.phase != "gradients":
        return None
    found, size = evidence.first, evidence.replicas
    power = _power(evidence.factor(found), size)
    if power is None:
        return None
    if power == "1/N" and _loss_is_a_sum(evidence):
        return (
            "the ranks' losses add up to the reference's: the loss is a sum over samples, or was "
            f"divided by the number of ranks{evidence.site('backward')}, and DDP takes the mean "
            "over the ranks: use the mean over each rank's samples"
        )
    why = {
        "N": "summed, not averaged: a hook that adds without dividing, or the loss or gradients "
        "were multiplied by the number of ranks",
        "1/N": "divided twice: DDP averages, and the loss or gradients were divided by the number "
        "of ranks, too",
        "N²": "summed twice: the loss was multiplied, and the gradients were added",
        "1/N²": "divided by the number of ranks twice, beside the mean that DDP takes",
    }
    return f"{power} times the reference's, alike on all ranks: {why[power]}{evidence.site('step')}"


def _loss_is_a_sum(evidence: Evidence) -> bool:
    """Return whether the ranks' losses add up to the reference's, as those of a sum do."""
    row = compare(evidence.runs, evidence.row.step, "forward")
    if row is None or row.differences:
        return False
    ours = [
        part.value or 0.0
        for rank in evidence.runs.ranks
        if (each := evidence.imprint(rank, "forward", "loss")) is not None
        for part in each.parts.values()
    ]
    wanted = evidence.runs.part(evidence.row.step, "forward", "loss", 0)
    if not ours or wanted is None or not wanted.value:
        return False
    return abs(sum(ours) / wanted.value - 1) < 0.01 and evidence.runs.size > 1


@rule
def not_averaged(evidence: Evidence) -> str | None:
    """Find gradients that each rank has for itself."""
    found = evidence.first
    if evidence.row.phase != "gradients" or found.imprint.how == "part":
        return None
    mean, wanted = evidence.mean(found), evidence.wanted(found)
    if mean is None or wanted is None or evidence.alike(found):
        return None
    if evidence.runs.copies:
        # The reference has averaged, or not, as the ranks should have.
        theirs = [evidence.wanted(found, rank) for rank in evidence.runs.ranks]
        known = [part for part in theirs if part is not None]
        wanted = _scaled(sum(known[1:], known[0]), 1 / len(known))
    if not evidence.close(found, mean, wanted):
        return None
    names = [each.name for each in evidence.row.differences]
    if len(names) == evidence.row.compared:
        return (
            "no gradient is averaged, each rank has its own: backward within no_sync(), or on a "
            f"model that no DDP has wrapped{evidence.site('step')}"
        )
    return (
        f"each rank has its own gradient of {', '.join(names[:3])}"
        f"{' …' if len(names) > 3 else ''}, the others are averaged: the parameter was replaced or "
        "added after the module was wrapped, or is ignored"
    )


@rule
def one_ranks_gradient(evidence: Evidence) -> str | None:
    """Find gradients that are those of one rank's samples, on all ranks."""
    found = evidence.first
    if evidence.row.phase != "gradients" or not evidence.alike(found):
        return None
    holders = evidence.holders(found)
    mine = evidence.parts(found)[holders[0]]
    for rank in holders if len(holders) > 1 else ():
        step = evidence.runs.step_of(rank, evidence.row.step)
        local = step.local.get(found.name) if step is not None else None
        if local is None:
            continue
        for c, how in ((1.0, "is"), (1 / len(holders), "is 1/N times")):
            if evidence.close(found, mine, _scaled(local.parts[rank], c)):
                return (
                    f"the gradient {how} that of rank {rank}'s samples, on all ranks: it was "
                    "copied from one rank, or the others contribute nothing"
                )
    return None


@rule
def reduced_in_halves(evidence: Evidence) -> str | None:
    """Find gradients that were rounded to half precision on their way."""
    found = evidence.first
    if evidence.row.phase != "gradients" or found.missing or found.extra:
        return None
    if found.imprint.how != "part" and not evidence.alike(found):
        return None
    if found.imprint.dtype not in ("float32", "float64") or not found.norm:
        return None
    relative = found.distance / found.norm
    if not 2**-15 < relative < 2**-6:
        return None
    step = evidence.runs.step_of(0, evidence.row.step)
    if step is not None and step.local and not _locals_are_right(evidence, found):
        return None
    name = min(HALVES, key=lambda dtype: abs(math.log(relative / HALVES[dtype])))
    return (
        f"a relative error of {relative:.1e}, alike on all ranks, as of sums in {name}: gradients "
        f"are reduced in less than their dtype {found.imprint.dtype} (a hook that compresses, "
        "autocast)"
    )


def _locals_are_right(evidence: Evidence, found: Difference) -> bool:
    """Return whether the mean of the gradients before they were averaged is the reference's."""
    parts = []
    for rank in evidence.runs.ranks:
        step = evidence.runs.step_of(rank, evidence.row.step)
        local = step.local.get(found.name) if step is not None else None
        if local is not None:
            parts.append(local.parts[rank])
    wanted = evidence.wanted(found)
    if len(parts) < evidence.runs.size or wanted is None:
        return False
    mean = _scaled(sum(parts[1:], parts[0]), 1 / len(parts))
    limit = 0.1 * found.distance + 100 * epsilon(found.imprint.dtype) * found.norm
    return distance(mean, wanted) < limit


@rule
def scaled_by_stage(evidence: Evidence) -> str | None:
    """Find gradients that each rank of a pipeline has scaled by a factor of its own."""
    if evidence.row.phase != "gradients" or not evidence.runs.microbatches:
        return None
    scales: dict[tuple[int, ...], list[float]] = {}
    for found in evidence.row.differences:
        c = evidence.factor(found)
        if c is None:
            return None
        scales.setdefault(tuple(evidence.holders(found)), []).append(c)
    if any(max(each) > 1.01 * min(each) or min(each) <= 0 for each in scales.values()):
        return None
    shown = ", ".join(f"{each[0]:.3g} on {named(ranks)}" for ranks, each in scales.items())
    return (
        f"the gradients are multiples of the reference's ({shown}){evidence.site('step')}: clipped "
        "or scaled by the norm of each rank's own stage; pipe.clip_gradients() takes the norm over "
        "all stages"
    )


@rule
def changed_gradient(evidence: Evidence) -> str | None:
    """Say on which ranks gradients are other ones."""
    found = evidence.first
    if evidence.row.phase != "gradients" or not evidence.alone:
        return None
    return (
        f"the gradient of {found.name} is another one on {named(found.ranks)} only: changed after "
        "it was averaged, or clipped by this rank's own norm"
    )


# -- after the step -------------------------------------------------------------------------------


@rule
def other_state(evidence: Evidence) -> str | None:
    """Find ranks whose optimizer had another state before the step."""
    if evidence.row.phase not in ("parameters", "optimizer"):
        return None
    row = compare(evidence.runs, evidence.row.step, "optimizer")
    if row is None or not row.differences:
        return None
    found = row.differences[0]
    if len(found.ranks) == len(evidence.holders(found)):
        return None
    return (
        f"the gradients are equal, but the optimizer of {named(found.ranks)} has another state: "
        f"{found.name}; it was loaded on some ranks only, or made steps that the others did not"
    )


@rule
def other_parameters(evidence: Evidence) -> str | None:
    """Say that equal gradients gave other parameters."""
    if evidence.row.phase != "parameters":
        return None
    ranks = f" on {named(evidence.first.ranks)}" if evidence.alone else ""
    return (
        f"the gradients are equal, the parameters after the step are not{ranks}: another learning "
        "rate or option of the optimizer, or parameters that are changed beside it"
    )


@rule
def other_buffers(evidence: Evidence) -> str | None:
    """Say that buffers are not made equal."""
    if evidence.row.phase != "buffers":
        return None
    where = f"on {named(evidence.first.ranks)} " if evidence.alone else ""
    return (
        f"the buffer has other values {where}than in the reference: it is computed from each "
        "rank's samples; see the option buffers of DDP"
    )

"""Taps on pipelines, and the pipeline of the reference: all stages in one process."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from ..frameworks.base import adapter, library
from ..parallel import DDP
from ..pipeline import partitioning
from ..pipeline.executor import PipelineExecutor
from ..pipeline.microbatches import bounds
from ..pipeline.partitioning import Partition, tied_in
from ..pipeline.pipeline import Pipeline, chunks_of
from .plan import StageForm, Stages
from .sketch import row_ids
from .taps import Joined, Naming, Taps, samples_of

# On N ranks a batch passes through the stages in microbatches.  In the reference one process has
# all stages, and the batch is one microbatch:
#
#   rank 0   stage 0: layers 0, 1   rows 0-3, 4-7     reference   layers 0, 1, 2, 3   rows 0-7
#   rank 1   stage 1: layers 2, 3   rows 0-3, 4-7
#
# Where the script cuts a model by md.partition(model, comm.size), one process has the whole model
# as one stage.  Where it builds the stages by hand, the reference gets those of the other ranks
# from their files.


class Cuts:
    """How the script has cut its models: which layers a stage has."""

    def __init__(self) -> None:
        # By the id of a stage: the stage, which keeps the id; its layers; how many stages there
        # are, of a model that was traced, else None.
        self._stages: dict[int, tuple[Any, tuple[int, int], int | None]] = {}

    def install(self) -> None:
        """Record every Partition."""
        make = Partition.__init__

        @wraps(make)
        def made(parts: Any, *arguments: Any, **options: Any) -> None:
            make(parts, *arguments, **options)
            for stage, layers in zip(parts, parts.layers, strict=True):
                self._stages[id(stage)] = stage, layers, len(parts) if parts.split else None

        Partition.__init__ = made  # type: ignore

    def add(self, stage: Any, cut: tuple[tuple[int, int], int | None] | None) -> None:
        """Record a stage that another process has cut."""
        if cut is not None:
            self._stages[id(stage)] = (stage, *cut)

    def of(self, stage: Any) -> tuple[tuple[int, int], int | None] | None:
        """Return the layers of a stage, and of how many stages if traced; None if made by hand."""
        found = self._stages.get(id(stage))
        return None if found is None else found[1:]

    def naming(self, stage: Any, number: int) -> Naming:
        """Return the function from a name in a stage to that in the whole model.

        The stage itself has no name if it is a part of a model that was cut: its output is that of
        its last layer.  In stages that are made by hand, names begin with the number of the stage.
        """
        found = self.of(stage)
        if found is None:
            return lambda name: f"stage{number}.{name}" if name else f"stage{number}"
        (start, _), traced = found
        if traced:
            return lambda name: name or None

        def naming(name: str) -> str | None:
            layer, dot, rest = name.partition(".")
            return f"{int(layer) + start}{dot}{rest}" if name else None

        return naming


def _bare(chunk: Any) -> Any:
    return chunk.module if isinstance(chunk, DDP) else chunk


def _parameters(stage: Any) -> list[Any]:
    return [p for _, p in adapter(library(stage), "framework").FRAMEWORK.parameters(stage)]


def _shapes(stage: Any) -> tuple[tuple[int, ...], ...]:
    return tuple([tuple(p.data.shape) for p in _parameters(stage)])


def install(taps: Taps) -> None:
    """Have the pipelines of this process report to `taps`; in a reference, give one all stages."""
    cuts = Cuts()
    cuts.install()
    make, step, backward = Pipeline.__init__, Pipeline.step, Pipeline.backward
    act = PipelineExecutor._act
    # Where no rank came so far as to have a pipeline, the reference fails as they did.
    alone = taps.plan.role != "ranks" and taps.plan.stages is not None

    @wraps(make)
    def tapped_make(
        pipe: Any, stage: Any, comm: Any, num_microbatches: Any, *schedule: Any, **options: Any
    ) -> None:
        tied = options.pop("tied", None)
        if taps.piped:
            taps.refuse("more than one pipeline in a script")
        if not alone:
            make(pipe, stage, comm, num_microbatches, *schedule, tied=tied, **options)
            _record(taps, cuts, pipe, tied)
            return
        chunks, numbers, tied = _whole(taps, cuts, chunks_of(stage, 0), tied)
        # The only schedule of any number of stages on one rank; with one microbatch it is plain.
        checkpoint = options.get("checkpoint", False)
        make(pipe, chunks, comm, 1, "interleaved", checkpoint=checkpoint, tied=tied)
        pipe.module = stage
        for chunk, number in zip(chunks, numbers, strict=True):
            _know(taps, cuts, _bare(chunk), number)

    @wraps(step)
    def tapped_step(
        pipe: Any, x: Any = None, target: Any = None, *arguments: Any, **options: Any
    ) -> float:
        if alone and (x is None or target is None):
            taps.refuse(
                "a pipeline whose step() gets a part of its arguments on each rank: expected "
                "step(x, target, loss_fn) alike on all ranks, which ignore what they do not need"
            )
        _begin(taps, pipe, x, target)
        try:
            loss = step(pipe, taps.perturb_inputs(x), target, *arguments, **options)
        finally:
            taps.batch = None
        taps.loss(loss)
        return loss

    @wraps(backward)
    def refused(*_: Any, **__: Any) -> None:
        taps.refuse("a pipeline's forward() and backward(): expected step()")

    @wraps(act)
    def tapped_act(executor: Any, task: Any, batch: Any) -> None:
        if task.kind != "F" or taps.batch is None:
            act(executor, task, batch)
            return
        rows = bounds(len(taps.batch[0]), executor._microbatches)[task.microbatch]
        with taps.microbatch(*rows):
            act(executor, task, batch)

    Pipeline.__init__ = tapped_make  # type: ignore
    Pipeline.step = tapped_step  # type: ignore
    Pipeline.backward = refused  # type: ignore
    PipelineExecutor._act = tapped_act  # type: ignore
    if alone:
        Pipeline._least = 1
        _trace_whole(cuts)


def _know(taps: Taps, cuts: Cuts, stage: Any, number: int) -> set[str]:
    adapted = adapter(library(stage), "taps").LIBRARY
    return taps.know_stage(adapted, stage, cuts.naming(stage, number), tied_in(stage))


# -- N ranks --------------------------------------------------------------------------------------


def _record(taps: Taps, cuts: Cuts, pipe: Any, tied: Mapping[str, Any] | None) -> None:
    """Record what this rank holds of a pipeline, and write its stages to a file."""
    place = pipe._executor.plan.placement
    held, forms, file = set(), {}, {}
    for k, chunk in enumerate(pipe._chunks):
        stage, number = _bare(chunk), place.stage(pipe.comm.rank, k)
        held |= _know(taps, cuts, stage, number)
        cut = cuts.of(stage)
        layers = None if cut is None or cut[1] else cut[0]
        forms[number] = StageForm(layers, _shapes(stage), taps.rank)
        file[number] = stage, cut, dict(tied_in(stage))
    first, chunks = place.owner(0)[0], range(place.chunks)
    taps.writer.facts(
        held=frozenset(held),
        microbatches=pipe.num_microbatches,
        replicas=pipe._replicas.count,
        first=tuple([place.stage(first, k) for k in chunks]),
        forms=forms,
    )
    path = taps.folder / f"stages-{taps.rank:06}"
    try:
        path.write_bytes(pickle.dumps((file, dict(tied or {}))))
    except Exception as error:  # whatever an attribute of a module raises
        path.unlink(missing_ok=True)
        taps.writer.facts(unwritten=f"{type(error).__name__}: {error}")


def _begin(taps: Taps, pipe: Any, x: Any, target: Any) -> None:
    """Tell the taps of all ranks which samples the batch has; collective."""
    plan, comm = pipe._executor.plan, pipe.comm
    own: Any = (taps.rank, samples_of(x)) if comm.rank == plan.first else None
    leader, ids = comm.broadcast_object(own, root=plan.first) if comm.size > 1 else own
    taps.writer.facts(leader=leader)
    taps.begin_batch(ids, leader)
    if comm.rank == plan.last:
        known = samples_of(target)
        if len(known) == len(ids):
            taps.step.pairs.append(row_ids([ids, known]))


# -- the reference --------------------------------------------------------------------------------


def _trace_whole(cuts: Cuts) -> None:
    """Let md.partition of a model that is traced make one stage: the model as it is."""
    trace = partitioning._traced

    @wraps(trace)
    def traced(model: Any, stages: Any, *rest: Any) -> Partition:
        if stages == 1:
            whole = Partition([model], "parameters", [0.0], [(0, 1)])
            cuts.add(model, ((0, 1), 1))
            return whole
        return trace(model, stages, *rest)

    partitioning._traced = traced  # type: ignore


def _whole(
    taps: Taps, cuts: Cuts, own: Sequence[Any], tied: Mapping[str, Any] | None
) -> tuple[list[Any], list[int], dict[str, list[Any]]]:
    """Return all stages of the model in order, their numbers, and the parameters to tie.

    `own` are the stages that the script makes as one process.  A number is that of the first of
    the ranks' stages that a stage has.
    """
    plan = taps.plan.stages
    assert plan is not None
    has = [_covered(taps, cuts, stage, k, plan) for k, stage in enumerate(own)]
    found = {min(numbers): stage for numbers, stage in zip(has, own, strict=True)}
    missing = set(plan.forms) - {number for numbers in has for number in numbers}
    shared = {name: _listed(p) for name, p in (tied or {}).items()}
    for stage in own:
        for name, p in tied_in(_bare(stage)).items():
            shared.setdefault(name, []).append(p)
    others = []
    for rank in sorted({plan.forms[number].rank for number in missing}):
        path = Path(taps.plan.start, f"stages-{rank:06}")
        if not path.exists():
            taps.refuse(
                f"stages that are made by hand on each rank, and cannot be pickled (rank {rank}): "
                "expected stages of md.partition(model, comm.size)"
            )
        file, more = pickle.loads(path.read_bytes())
        for name, p in more.items():
            shared.setdefault(name, []).extend(_listed(p))
        for number, (stage, cut, inner) in file.items():
            if number not in missing:
                continue
            cuts.add(stage, cut)
            for name, p in inner.items():
                shared.setdefault(name, []).append(p)
            others += _parameters(stage)
            found[number] = DDP(stage, own[0].comm) if isinstance(own[0], DDP) else stage
    if missing:
        mine = [p for stage in own for p in _parameters(_bare(stage))]
        taps.joined = Joined(mine, others)
        taps.writer.facts(joined=len(missing))
    # What is one object in this process need not be tied.
    ties = {name: list({id(p): p for p in ps}.values()) for name, ps in shared.items()}
    ties = {name: ps for name, ps in ties.items() if len(ps) > 1}
    numbers = sorted(found)
    return [found[number] for number in numbers], numbers, ties


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _covered(taps: Taps, cuts: Cuts, chunk: Any, k: int, plan: Stages) -> set[int]:
    """Return the numbers of the ranks' stages that chunk `k` of the one process has."""
    stage = _bare(chunk)
    cut = cuts.of(stage)
    if cut is not None and cut[1] == 1:
        return set(plan.forms)
    if cut is not None and not cut[1]:
        start, stop = cut[0]
        ranges = {number: form.layers for number, form in plan.forms.items()}
        found = {n for n, own in ranges.items() if own and start <= own[0] and own[1] <= stop}
        if found:
            return found
    number = plan.first[k] if k < len(plan.first) else None
    if number is None or plan.forms[number].shapes != _shapes(stage):
        taps.refuse(
            f"this pipeline: as one process, the script makes another stage than rank 0 does "
            f"(chunk {k}): expected stages of md.partition(model, comm.size), or rank 0's stage"
        )
    return {number}

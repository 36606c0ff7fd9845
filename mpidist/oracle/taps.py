"""Taps: what a training script computes, recorded while it runs unchanged."""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np

from ..device.recognise import on_host
from ..engine.call_site import users_frame
from ..errors import MpidistError, Unsupported
from ..frameworks.base import Framework, WeakHook, framework_of, nothing
from .log import NOBODY, Imprint, Part, Step, Writer
from .plan import Plan
from .sketch import SUMS, fingerprint, row_ids, sketch, sketch_rows

OTHERS_WITHIN = 10.0  # seconds in which the other ranks end their last step
OUTPUT = "output"  # name of the output of a whole model
Naming = Callable[[str], Any]  # of a module, parameter or buffer its name in the whole model


class Library(Protocol):
    """What the taps must know of a library of models, beside its :class:`Framework`."""

    framework: Framework

    def install(self, taps: Taps) -> None:
        """Have calls of modules, losses and optimizers reported to `taps`."""

    def is_wrapper(self, module: Any) -> bool:
        """Return whether a module only passes on to another one, as a DDP does."""

    def is_recorded(self, module: Any) -> bool:
        """Return whether a call of a model is a part of training, not of an evaluation."""

    def modules(self, model: Any) -> Iterable[tuple[str, Any]]:
        """Return names and modules of a model; the model itself has the name ""."""

    def trait(self, module: Any) -> str:
        """Return "batch statistics", "dropout" or ""."""

    def random_state(self) -> object:
        """Return what changes when the library draws random numbers."""

    def states(self, optimizer: Any) -> dict[int, Mapping[str, Any]]:
        """Return the state of an optimizer, by the id of the parameter."""

    def extend(self, optimizer: Any, parameters: Sequence[Any]) -> bool:
        """Give an optimizer more parameters, unless it has several groups; return whether."""


@dataclass
class Joined:
    """Stages that a reference has from other ranks: what acts on its own acts on these, too."""

    own: list[Any]  # parameters that the script knows of
    others: list[Any]
    stepped: bool = False  # whether an optimizer has the others


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the arrays in nested tuples, lists and dicts, with names such as ``head[1]``."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(f"{name}.{key}", item)
    elif isinstance(value, (tuple, list)):
        for k, item in enumerate(value):
            yield from leaves(f"{name}[{k}]", item)
    elif hasattr(value, "shape") and hasattr(value, "dtype"):
        yield name, value


def _replaced(value: Any, act: Callable[[Any], Any]) -> Any:
    """Return `value` with ``act(array)`` in place of each array in tuples, lists and dicts."""
    if type(value) in (tuple, list):
        return type(value)(_replaced(item, act) for item in value)
    if type(value) is dict:
        return {key: _replaced(item, act) for key, item in value.items()}
    return act(value) if hasattr(value, "shape") and hasattr(value, "dtype") else value


def host(x: Any) -> np.ndarray | None:
    """Return an array in host memory of an array of any library; None if it cannot be read."""
    try:
        return framework_of(x).as_array(on_host(x))
    except (MpidistError, TypeError, ValueError, RuntimeError):
        return None


def samples_of(inputs: Any) -> np.ndarray:
    """Return the ids of the samples in the inputs of a model: the rows of its arrays."""
    arrays = [host(x) for _, x in leaves("", inputs)]
    batch = [a for a in arrays if a is not None and a.ndim]
    batch = [a for a in batch if len(a) == len(batch[0])]
    return row_ids(batch) if batch else np.empty(0, np.uint64)


def _buffers(library: Library, model: Any, naming: Naming) -> Iterator[tuple[str, Any]]:
    for name, values in library.framework.buffers(model):
        yield naming(name), values


def _is_set(p: Any) -> bool:
    """Return whether a parameter has a gradient that is not zero."""
    array = None if p.grad is None else host(p.grad)
    return array is not None and bool(array.any())


def is_inexact(array: np.ndarray) -> bool:
    """Return whether an array has floating-point or complex numbers, of ml_dtypes too."""
    return array.dtype.kind in "fc" or array.dtype.name == "bfloat16"


def _assign(x: Any, value: np.ndarray) -> None:
    """Copy `value` into an array of any library, in place."""
    if isinstance(x, np.ndarray):
        x[...] = value
    else:
        framework = framework_of(x)
        framework.copy(x, framework.from_array(value))


class Taps:
    """Records the steps of a training in this process, and ends it after the last one.

    `plan` is the role of this process, `folder` that of the logs of its run, and `rank` its number
    there.
    """

    def __init__(self, plan: Plan, folder: Path, rank: int):
        self.plan, self.folder, self.rank = plan, folder, rank
        self.writer = Writer(folder, rank)
        self.step = Step(1)
        self.random = np.random.default_rng((plan.seed, rank, 2))
        self._depth = 0
        self._ids, self._groups = np.empty(0, np.uint64), np.empty(0, np.int64)
        # Of samples that a model has computed, the ids by those of their bits.
        self._computed: dict[int, int] = {}
        self._models: list[tuple[Library, Any, Naming]] = []
        self._started = 0  # models whose parameters were recorded
        # Of modules, by id; None for one that is not recorded.  The models keep them alive.
        self._names: dict[int, str | None] = {}
        self._parameters: dict[int, str] = {}
        self._tied: dict[int, str] = {}
        self._kept: list[Any] = []  # what has an id above
        self._owners: dict[int, list[int]] = {}
        self._sharded = False
        # Whether there is a pipeline, and one of its microbatches in forward; in a step of it, ids
        # and owners of the samples of the batch.
        self.piped = self._inside = False
        self.batch: tuple[np.ndarray, np.ndarray] | None = None
        # Names of parameters of which a DDP promises the same bits on any number of ranks.
        self._exact: set[str] = set()
        self.joined: Joined | None = None
        # Averages the gradients of parameters over the copies of a reference.
        self.average: Callable[[Sequence[Any]], object] = nothing
        self._last: Any = None  # output that was recorded
        self._take_owners()

    # -- models -----------------------------------------------------------------------------------

    def know(self, library: Library, model: Any) -> bool:
        """Learn the names in a model; return whether it is one: a module with parameters."""
        if id(model) in self._names:
            return True
        named = library.framework.parameters(model)
        if not named:
            return False
        number = len(self._models) + 1
        prefix = "" if number == 1 else f"model{number}."

        def naming(name: str) -> str:
            return prefix + (name or OUTPUT)

        self._models.append((library, model, naming))
        for name, module in library.modules(model):
            self._names.setdefault(id(module), naming(name))
            self._kept.append(module)
        for name, p in named:
            self._parameters.setdefault(id(p), naming(name))
            self._watch(library, p)
        return True

    def promise_bits(self, framework: Framework, model: Any) -> None:
        """Record the bits of a model's parameters, too, of their gradients and states."""
        known = (self._parameters.get(id(p)) for _, p in framework.parameters(model))
        self._exact |= {name for name in known if name is not None}

    def know_stage(
        self, library: Library, stage: Any, naming: Naming, tied: Mapping[str, Any]
    ) -> set[str]:
        """Learn the names in a stage of a pipeline; return those of parameters and buffers.

        They are ``naming(name)``, and take the place of those that a DDP around the stage may have
        given.  `tied` has the names in the whole model of parameters that other stages have, too.
        """
        self._tied.update({id(p): name for name, p in tied.items()})
        known = id(stage) in self._names
        self._models = [each for each in self._models if each[1] is not stage]
        self._models.append((library, stage, naming))
        self.piped, found = True, {naming(name) for name, _ in library.framework.buffers(stage)}
        for name, module in library.modules(stage):
            self._names[id(module)] = naming(name)
            self._kept.append(module)
        for name, p in library.framework.parameters(stage):
            self._parameters[id(p)] = self._tied.get(id(p)) or naming(name)
            found.add(self._parameters[id(p)])
            if not known:
                self._watch(library, p)
        return found

    def _watch(self, library: Library, p: Any) -> None:
        self._kept.append(p)
        # Weak: the copy of a stage that is written to a file has no taps.
        library.framework.on_gradient(p, partial(WeakHook(self._local), p))

    def _local(self, p: Any) -> None:
        """Record a gradient of the first step before it is averaged."""
        if self.step.number == 1 and p.grad is not None:
            name = self._parameters[id(p)]
            imprint = self._whole(name, p.grad)
            if imprint is not None:
                self.step.local[name] = imprint

    def _start(self) -> None:
        """Record parameters and buffers before the first step, and set the reference's."""
        for number, (library, model, naming) in enumerate(self._models):
            if number < self._started:
                continue
            named = [*self._values(library, model, naming), *_buffers(library, model, naming)]
            self._set_start(number, named)
            for name, values in named:
                found = self._whole(name, values)
                if found is not None and name not in self.step.tensors.get("start", {}):
                    # Replicas begin with the same bits.
                    found.hash = fingerprint(np.asarray(host(values)))
                    self._put("start", found)
            if self.plan.role == "perturbed":
                for name, values in named:
                    if name in set(self._parameters.values()):
                        self._perturb(values)
        self._started = len(self._models)

    def _values(self, library: Library, model: Any, naming: Naming) -> Iterator[tuple[str, Any]]:
        """Yield names and values of the parameters of a model."""
        for name, p in library.framework.parameters(model):
            yield self._tied.get(id(p)) or naming(name), library.framework.values(p)

    def _set_start(self, number: int, named: list[tuple[str, Any]]) -> None:
        """Save the values of rank 0; in the reference, set those that differ to the saved ones.

        Of a pipeline, those of all ranks are saved.  `number` is that of the model.
        """
        if self.plan.role == "ranks":
            if self.rank == 0 or self.piped:
                values = {name: np.array(host(x)) for name, x in named}
                path = self.folder / f"start-{self.rank:06}-{number}"
                path.write_bytes(pickle.dumps(values))
            return
        saved = self._saved
        for name, x in named:
            value, array = saved.get(name), host(x)
            if value is None or array is None or value.shape != array.shape:
                continue
            if fingerprint(value) != fingerprint(array):
                self.writer.facts(start=name)
                _assign(x, value)

    @cached_property
    def _saved(self) -> dict[str, np.ndarray]:
        """The values before the first step on N ranks, those of the lowest rank that has them."""
        found: dict[str, np.ndarray] = {}
        for path in sorted(Path(self.plan.start).glob("start-*")) if self.plan.start else ():
            found = {**pickle.loads(path.read_bytes()), **found}
        return found

    # -- pipelines --------------------------------------------------------------------------------

    def begin_batch(self, ids: np.ndarray, leader: int) -> None:
        """Begin a batch of a pipeline, whose samples have these ids.

        `leader` is the rank that has the samples, on the first stage.
        """
        self.batch = ids, self._of_ranks(ids)
        self.step.batches += 1
        if self.step.batches > 1:
            self.writer.step(self.step)  # the optimizer's step, which would do so, may never come
        if leader == self.rank or self.plan.role != "ranks":
            self.step.ids.append(ids)
        if self.joined is not None and not any(_is_set(p) for p in self.joined.own):
            for p in self.joined.others:
                p.grad = None

    @contextmanager
    def microbatch(self, start: int, stop: int) -> Iterator[None]:
        """Return a context in which the samples of a call are these of the pipeline's batch."""
        assert self.batch is not None
        ids, groups = self.batch
        self._ids, self._groups, self._inside = ids[start:stop], groups[start:stop], True
        try:
            yield
        finally:
            self._inside = False

    def perturb_inputs(self, inputs: Any) -> Any:
        """Return the inputs of a model, perturbed if that is this run's role."""
        return _replaced(inputs, self._perturbed) if self.plan.role == "perturbed" else inputs

    def join(self, library: Library, optimizer: Any, parameters: Sequence[Any]) -> None:
        """Give the first optimizer that has the script's own stages those of the other ranks."""
        if self.joined is None or self.joined.stepped:
            return
        known = {id(p) for p in self.joined.own}
        if not any(id(p) in known for p in parameters):
            return
        if not library.extend(optimizer, self.joined.others):
            self.refuse(
                "stages that are made by hand on each rank, with an optimizer of several groups: "
                "expected stages of md.partition(model, comm.size)"
            )
        self.joined.stepped = True

    def refuse(self, what: str) -> NoReturn:
        """Raise Unsupported, and have the check say why."""
        self.writer.facts(unsupported=what)
        raise Unsupported(f"mpidist check does not compare {what}")

    # -- forward ----------------------------------------------------------------------------------

    def call(self, library: Library, original: Any, module: Any, inputs: Any, options: Any) -> Any:
        """Call a module, and record its output if it is a part of a model in training."""
        if library.is_wrapper(module) or (self._depth == 0 and not library.is_recorded(module)):
            return original(module, *inputs, **options)
        outermost = self._depth == 0
        if outermost and self.piped and not self._inside:
            return original(module, *inputs, **options)  # not in a step of the pipeline
        if outermost:
            if not self.know(library, module):
                return original(module, *inputs, **options)
            inputs, options = self._begin(inputs, options)
            before = library.random_state()
        self._depth += 1
        try:
            output = original(module, *inputs, **options)
        finally:
            self._depth -= 1
        if outermost:
            self.step.random |= library.random_state() != before
            self._note_computed(output)
        self._output(library, module, output)
        return output

    def _begin(self, inputs: Any, options: Any) -> tuple[Any, Any]:
        """Begin a forward of a model; return its inputs, perturbed if that is this run's role."""
        self._start()
        if self.piped:
            return inputs, options
        # Bits that were computed differ between the runs: such a sample is that from which it was.
        found = samples_of((inputs, options)).tolist()
        self._ids = np.array([self._computed.get(i, i) for i in found], np.uint64)
        self._groups = self._of_ranks(self._ids)
        self.step.ids.append(self._ids)
        return self.perturb_inputs((inputs, options))

    def _note_computed(self, output: Any) -> None:
        """Note the rows of a model's output: they may be samples of another one, as in a GAN."""
        arrays = [host(x) for _, x in leaves("", output)] if len(self._models) > 1 else []
        for array in arrays:
            if array is not None and array.ndim and len(array) == len(self._ids) and array.size:
                origins = row_ids([self._ids])  # other ids than those of the samples themselves
                self._computed.update(zip(row_ids([array]).tolist(), origins.tolist()))

    def _of_ranks(self, ids: np.ndarray) -> np.ndarray:
        return np.array([self._owner(int(i)) for i in ids], np.int64)

    def _owner(self, sample: int) -> int:
        """Return the rank that has a sample in this step."""
        if self.plan.processes > 1 or self.plan.ranks == 1:
            return self.rank
        owners = self._owners.get(sample, [])
        return owners.pop(0) if owners else NOBODY

    def _take_owners(self) -> None:
        found = self.plan.owners.get(self.step.number, {})
        self._owners = {sample: list(ranks) for sample, ranks in found.items()}

    def _output(self, library: Library, module: Any, output: Any) -> None:
        name = self._names.get(id(module))
        count = len(self._ids)
        # A chain of modules passes on the output of its last one.
        if name is None or not count or output is self._last:
            return
        self._last = output
        for leaf, x in leaves(name, output):
            array = host(x)
            if array is None or not array.ndim or not array.size or not is_inexact(array):
                continue
            # The samples are the first dimension, or the second one (the first is time), or the
            # first one is samples times something, flattened.
            if len(array) == count:
                layout = "first"
            elif array.ndim > 1 and array.shape[1] == count:
                array, layout = np.moveaxis(array, 1, 0), "second"
            elif len(array) % count == 0:
                layout = "flat"
            else:
                continue
            sums, squares = sketch_rows(leaf, array.reshape(count, -1), self._ids)
            parts = {}
            for rank in np.unique(self._groups):
                mine = self._groups == rank
                parts[int(rank)] = Part(
                    sums[mine].sum(axis=0), float(squares[mine].sum()), int(mine.sum())
                )
            kind, trait = type(module).__name__, library.trait(module)
            imprint = Imprint(
                leaf, "rows", array.dtype.name, array.shape[1:], layout, parts, None, kind, trait
            )
            self._put("forward", imprint)

    def loss(self, value: float) -> None:
        """Record the loss of a backward pass; of a pipeline, that of its whole batch."""
        if self.batch is not None:
            return
        self.step.sites["backward"] = _site()
        part = Part(np.zeros(SUMS), value * value, 1, value)
        self._put("forward", Imprint("loss", "loss", parts={self.rank: part}))

    # -- steps ------------------------------------------------------------------------------------

    def name_of(self, optimizer: Any, number: int, p: Any) -> str:
        """Return the name of a parameter of an optimizer."""
        if id(p) not in self._parameters:
            self._learn_parameters()
        return self._parameters.get(id(p), f"{type(optimizer).__name__}.{number}")

    def _learn_parameters(self) -> None:
        """Learn the names of parameters that have taken the place of others."""
        for library, model, naming in self._models:
            for name, p in library.framework.parameters(model):
                if id(p) not in self._parameters:
                    self._parameters[id(p)] = naming(name)
                    self._kept.append(p)

    def before_step(self, optimizer: Any, parameters: Sequence[Any]) -> None:
        """Record the gradients that an optimizer will use."""
        if self._sharded:
            return
        self.average(parameters)
        self.step.tensors.pop("gradients", None)  # of a closure that is called several times
        self.step.sites["step"] = _site()
        for number, p in enumerate(parameters):
            name = self.name_of(optimizer, number, p)
            found = Imprint(name, "whole") if p.grad is None else self._whole(name, p.grad)
            self._put("gradients", found)

    def after_step(self, library: Library, optimizer: Any, parameters: Iterable[Any]) -> None:
        """Record parameters, state and buffers after an optimizer's step, and begin another one."""
        if self._sharded:
            return
        states = library.states(optimizer)
        for number, p in enumerate(parameters):
            name = self.name_of(optimizer, number, p)
            for key, value in states.get(id(p), {}).items():
                self._put("optimizer", self._whole(f"{name}.{key}", value))
        self._end_step()

    def zero_step(self, original: Any, optimizer: Any, *arguments: Any) -> Any:
        """Make a step of a ZeroOptimizer, and record the pieces of this rank."""
        if self.joined is not None and not self.joined.stepped:
            self.refuse(
                "stages that are made by hand on each rank, with a ZeroOptimizer: expected stages "
                "of md.partition(model, comm.size)"
            )
        self.step.sites["step"] = _site()
        library = next(lib for lib, model, _ in self._models)
        for piece in optimizer.pieces:
            name = self.name_of(optimizer, 0, piece.parameter)
            if piece.parameter.grad is not None:
                found = self._whole(name, piece.grad, "part", piece.start, piece.shape)
                self._put("gradients", found)
        self._sharded = True
        try:
            result = original(optimizer, *arguments)
        finally:
            self._sharded = False
        states = library.states(optimizer.optimizer)
        for piece in optimizer.pieces:
            name = self.name_of(optimizer, 0, piece.parameter)
            for key, value in states.get(id(piece.flat), {}).items():
                how = "part" if piece.is_like(value) else "some"
                start = piece.start if how == "part" else 0
                self._put("optimizer", self._whole(f"{name}.{key}", value, how, start))
        self._end_step()
        return result

    def _end_step(self) -> None:
        for each in self._models:
            for name, values in self._values(*each):
                if name not in self.step.tensors.get("parameters", {}):  # two chunks may share it
                    self._put("parameters", self._whole(name, values))
            for name, values in _buffers(*each):
                self._put("buffers", self._whole(name, values))
        self.step.stepped = True
        self.writer.step(self.step)
        if self.step.number == self.plan.steps:
            self._finish()
        self.step, self._last = Step(self.step.number + 1), None
        self._take_owners()

    def ended(self) -> None:
        """Record what is left when the script ends before its last step to be recorded."""
        if self.step.ids:
            self.writer.step(self.step)
        self.writer.facts(ended=True)

    def _finish(self) -> None:
        """End this process, as soon as all have recorded their last step."""
        self.writer.facts(done=True)
        (self.folder / f"done-{self.rank}").touch()
        until = time.monotonic() + OTHERS_WITHIN
        while time.monotonic() < until:
            if len(list(self.folder.glob("done-*"))) == self.plan.processes:
                break
            time.sleep(0.02)
        sys.stdout.flush()
        sys.stderr.flush()
        # Not SystemExit: what the script does at its end may be collective, or take long.
        os._exit(0)

    # -- arrays -----------------------------------------------------------------------------------

    def _put(self, phase: str, imprint: Imprint | None) -> None:
        if imprint is not None:
            self.step.put(phase, imprint)

    def _whole(
        self,
        name: str,
        x: Any,
        how: str = "whole",
        start: int = 0,
        shape: tuple[int, ...] | None = None,
    ) -> Imprint | None:
        """Return the imprint of an array that is not divided into rows; None if it has none."""
        if isinstance(x, (bool, int, float, np.generic)):
            x = np.asarray(x)
        if not hasattr(x, "shape"):
            return None
        if getattr(x, "is_sparse", False):
            x = x.to_dense()
        array = host(x)
        if array is None or not array.size:
            return None
        sums, squares = sketch(name, array, start)
        value = float(array.reshape(-1)[0].real) if array.size == 1 else None
        part = Part(sums, squares, 0, value)
        dtype = array.dtype.name if is_inexact(array) else "exact"
        whole = tuple(array.shape if shape is None else shape)
        promised = name in self._exact or name.rpartition(".")[0] in self._exact  # a state's
        bits = fingerprint(array) if promised and how == "whole" else None
        return Imprint(name, how, dtype, whole, "", {self.rank: part}, bits)

    def _perturb(self, x: Any) -> None:
        """Move each element of an array to a neighbouring floating-point number, in place."""
        array = host(x)
        if array is None or array.dtype.kind == "c" or not is_inexact(array):
            return
        up = self.random.integers(0, 2, array.shape).astype(bool)
        far = np.where(up, np.inf, -np.inf).astype(array.dtype)
        with np.errstate(all="ignore"):
            moved = np.nextafter(array, far)
        # A zero stays: its neighbours are denormal, and often it means "none".
        _assign(x, np.where(array == 0, array, moved))

    def _perturbed(self, x: Any) -> Any:
        array = host(x)
        if array is None or not is_inexact(array) or getattr(x, "requires_grad", False):
            return x
        copy = np.array(array)
        self._perturb(copy)
        return framework_of(x).from_array(copy)


def _site() -> str:
    """Return the file and line of the user's program from which this is called."""
    frame = users_frame(sys._getframe(1))
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"

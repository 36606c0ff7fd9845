"""Runs one rank's tasks: receive, compute, send on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from ...errors import InvalidArgument
from ...pipeline import Span
from .batch_loss import BatchLoss
from .edges import Edges
from .live import Live
from .parcel import Form, Parcel, Tensors
from .structure import ONE_TENSOR, flatten, unflatten
from .tasks import Program, Task, say_where


@dataclass
class Batch:
    """What a run is about.

    Attributes
    ----------
    inputs, rows : list
        The microbatches and their numbers of rows, where the first stage is.
    loss : BatchLoss or None
        Where the last stage is.
    grads : list or None
        The gradients of the last stage's outputs, in place of losses.
    keep : bool
        Whether there will be a way back.
    total : float
        The losses, added up.
    outputs : dict of int to object
        The last stage's outputs where no loss is computed of them.
    """

    inputs: Sequence[Any] = ()
    rows: Sequence[int] = ()
    loss: BatchLoss | None = None
    grads: Sequence[Any] | None = None
    keep: bool = True
    total: float = 0.0
    outputs: dict[int, Any] = field(default_factory=dict)


class Executor:
    """Runs programs.

    Parameters
    ----------
    edges : Edges
        To and from the other ranks.
    completes : callable
        ``completes(chunk)`` is called before the action that completes the chunk's gradients.

    Attributes
    ----------
    live : Live
        What is alive.
    spans : list of Span
        The actions that were run since it was emptied, in seconds of ``perf_counter``.
    """

    def __init__(self, edges: Edges, completes: Callable[[int], object]):
        self.edges, self.live = edges, Live()
        self._completes = completes
        self._saved: dict[tuple[int, int], Any] = {}
        self._handed: dict[int, Parcel] = {}
        self.spans: list[Span] = []

    def forget(self) -> None:
        """Drop what a forward kept for a backward that never came."""
        self._saved.clear()
        self._handed.clear()

    def run(self, program: Program, batch: Batch) -> None:
        """Run a program; sends may be under way afterwards."""
        edges = self.edges
        act = {"F": self._forward, "B": self._backward, "I": self._input, "W": self._weight}
        for message, tag, worker in program.opening:
            edges.post(message.source, tag, worker.tensors)
        for task in program.tasks:
            try:
                parcel = None
                if task.receive is not None:
                    parcel = self._take(task)
                if task.completes:
                    self._completes(task.chunk)
                begin = perf_counter()
                made = act[task.kind](task, parcel, batch)
                self.spans.append(Span(task.action, begin, perf_counter()))
                send = task.send
                if send is None or made is None:
                    continue
                if send.local:
                    self._handed[task.send_tag] = made
                else:
                    edges.send(send.target, task.send_tag, made)
            except Exception as error:
                say_where(error, task)
                raise

    def _take(self, task: Task) -> Parcel:
        """Wait for what the task needs, and have receives ready for what comes after it."""
        message = task.receive
        assert message is not None
        if message.local:
            return self._handed.pop(task.receive_tag)
        parcel = self.edges.receive(message, task.receive_tag, task.worker.tensors)
        if task.following is not None:
            self.edges.post(message.source, task.following_tag, task.worker.tensors)
        return parcel

    def _forward(self, task: Task, parcel: Parcel | None, batch: Batch) -> Parcel | None:
        worker, tree = task.worker, None
        leaves: list[Any] = []
        if parcel is None:
            value, rows = batch.inputs[task.microbatch], batch.rows[task.microbatch]
        else:
            form, tensor = parcel.form, worker.tensors.tensor
            leaves = [tensor(array, f) for array, f in zip(parcel.arrays, form.tensors)]
            tree, rows = form.tree, form.rows
            value = unflatten(tree, leaves)
        loss = batch.loss if task.last else None
        output, saved = worker.forward(value, tree, leaves, batch.keep, loss is not None)
        if saved is not None:
            self._saved[task.chunk, task.microbatch] = saved
        made = None
        if loss is not None:
            part = loss.of(task.microbatch, rows)
            batch.total += worker.attach_loss(saved, output, part)
        else:
            made = self._output(task, output, saved, rows, batch)
        if saved is not None:
            self.live.enter(saved, worker.nbytes(saved))
        return made

    def _output(
        self, task: Task, output: Any, saved: Any, rows: int, batch: Batch
    ) -> Parcel | None:
        tree, tensors = flatten(output, "the output of a stage")
        if not tensors and not task.last:
            raise InvalidArgument(
                f"the output of a stage is {output!r}: allowed are tensors, and tuples, lists and "
                "dicts with at least one in them"
            )
        if saved is not None:
            task.worker.finish(saved, tree, tensors)
        library = task.worker.tensors
        if task.last:
            batch.outputs[task.microbatch] = unflatten(tree, [library.result(t) for t in tensors])
            return None
        return _pack(library, tree, tensors, rows, library.own)

    def _gradients(self, task: Task, parcel: Parcel | None, batch: Batch) -> list[Any] | None:
        """Give the gradients of the outputs; None where the loss begins."""
        if parcel is not None:
            form, tensor = parcel.form, task.worker.tensors.tensor
            given = [tensor(array, f) for array, f in zip(parcel.arrays, form.tensors)]
            return given if form.tree == ONE_TENSOR else list(unflatten(form.tree, given))
        return None if batch.grads is None else batch.grads[task.microbatch]

    def _kept(self, task: Task) -> Any:
        key = task.chunk, task.microbatch
        return self._saved.pop(key) if task.releases else self._saved[key]

    def _backward(self, task: Task, parcel: Parcel | None, batch: Batch) -> Parcel | None:
        grads = self._gradients(task, parcel, batch)
        return _packed_gradients(task, task.worker.backward(self._kept(task), grads))

    def _input(self, task: Task, parcel: Parcel | None, batch: Batch) -> Parcel | None:
        grads, saved = self._gradients(task, parcel, batch), self._kept(task)
        found = task.worker.backward_input(saved, grads)
        nbytes = task.worker.nbytes(saved)
        if nbytes != saved.size:
            saved.resize(nbytes)
        return _packed_gradients(task, found)

    def _weight(self, task: Task, parcel: Parcel | None, batch: Batch) -> None:
        task.worker.backward_weight(self._kept(task))


def _pack(
    library: Tensors, tree: Any, tensors: list[Any], rows: int, array: Callable[[Any], Any]
) -> Parcel:
    form = Form(tree, tuple([library.form(t) for t in tensors]), rows)
    return Parcel(form, [array(t) for t in tensors])


def _packed_gradients(task: Task, grads: list[Any]) -> Parcel | None:
    """Make a parcel of the inputs' gradients, where somebody waits for it."""
    if task.send is None:
        return None
    library, tree = task.worker.tensors, ONE_TENSOR
    if len(grads) != 1 or grads[0] is None:
        tree, grads = flatten(tuple(grads))
    return _pack(library, tree, grads, 0, library.array)

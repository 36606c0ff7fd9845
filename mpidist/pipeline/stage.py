"""A stage as the executor sees it: forward of one microbatch, its backward, and recomputation."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import Any, Protocol

from ..device.recognise import is_on_device
from ..frameworks.base import adapter, library
from ..gpu.messages import Parcels, takes_addresses
from ..parallel.ddp import DDP
from .values import Tensors, flatten


class Held:
    """What a forward keeps for the way back; stages derive theirs from it."""

    __slots__ = ("live", "size")

    live: Any
    size: int

    def resize(self, nbytes: int) -> None:
        """Take down that it keeps more or fewer bytes than before, if it is counted."""
        live = getattr(self, "live", None)
        if live is not None:
            live.nbytes += nbytes - self.size
            live.peak_bytes = max(live.peak_bytes, live.nbytes)
            self.size = nbytes

    def __del__(self) -> None:
        live = getattr(self, "live", None)
        if live is not None:
            live.count -= 1
            live.nbytes -= self.size


class Size:
    """The bytes that a microbatch keeps; None where nobody has counted yet.

    Attributes
    ----------
    whole : int or None
        After forward.
    halfway : int or None
        After the first half of backward.
    """

    __slots__ = ("whole", "halfway")

    def __init__(self) -> None:
        self.whole: int | None = None
        self.halfway: int | None = None


class Sizes:
    """Sizes of microbatches, one for all that are made alike."""

    LIMIT = 256  # batches of ever new shapes must not fill the memory

    def __init__(self) -> None:
        self._found: dict[Hashable, Size] = {}

    def __len__(self) -> int:
        return len(self._found)

    def of(self, key: Hashable) -> Size:
        """Give the one of microbatches like this."""
        size = self._found.get(key)
        if size is None:
            if len(self._found) >= self.LIMIT:
                self._found.clear()
            size = self._found[key] = Size()
        return size


MARK = "@gpu"
"""Ends the dtype of a form whose sender has the tensor on a GPU."""


class OnDevice:
    """The place of a stage's tensors: where its parameters are, or without any the sender's are.

    Attributes
    ----------
    there : bool or None
        Whether the parameters are on a GPU; None without any.
    direct : callable
        ``direct()`` tells whether the MPI library takes addresses on a GPU.
    """

    def __init__(self, parameters: Iterable[Any] = ()):
        places = [is_on_device(p.data) for p in parameters]
        self.there: bool | None = any(places) if places else None
        self.direct: Callable[[], bool] = bool

    @cached_property
    def parcels(self) -> Parcels:
        """What moves tensors."""
        return Parcels(self.direct())

    def place(self, dtype: str) -> tuple[str, bool]:
        """Give the dtype of a form without its mark, and whether this stage has it on a GPU."""
        marked = dtype.endswith(MARK)
        name = dtype[: -len(MARK)] if marked else dtype
        return name, marked if self.there is None else self.there


class Stage(Protocol):
    """One chunk of the model on this rank.

    Attributes
    ----------
    module : object
        The chunk itself, without a wrapper.
    """

    module: Any

    @property
    def splits(self) -> bool:
        """Whether backward can be done in halves; else all of it is done in the first."""

    @property
    def tensors(self) -> Tensors:
        """How its values become parcels."""

    @property
    def training(self) -> bool:
        """Whether the module is in training."""

    @property
    def differentiates(self) -> bool | None:
        """Whether a graph is made of what is computed now; None without autograd."""

    def forward(
        self, value: Any, tree: Any, leaves: list[Any], keep: bool, ends: bool = False
    ) -> tuple[Any, Any]:
        """Compute the output, and give what the way back needs, or None without `keep`.

        `leaves` are the tensors of the input whose gradients are asked for, laid out like `tree`;
        none and None for the first stage.  With `ends`, :meth:`attach_loss` comes next.
        """

    def draft(self, value: Any) -> tuple[Any, Any]:
        """Compute the output only, and give what :meth:`again` needs; `value` stays as it is."""

    def again(self, moment: Any) -> AbstractContextManager[Any]:
        """Give a context in which a forward computes once more what a draft has.

        Random numbers are the same, and running statistics stay as they are now.
        """

    def finish(self, saved: Any, tree: Any, outputs: list[Any]) -> None:
        """Take the tensors of the output: gradients will come for them."""

    def attach_loss(self, saved: Any, output: Any, loss: Any) -> float:
        """Compute the loss of the last stage's output: backward begins there; give its value."""

    def backward(self, saved: Any, grads: list[Any] | None) -> list[Any]:
        """Go back: B.  `grads` are those of the outputs (or None); None begins at the loss.

        Nobody else may keep the memory of the gradients that are given back.
        """

    def backward_input(self, saved: Any, grads: list[Any] | None) -> list[Any]:
        """Do the first half: I."""

    def backward_weight(self, saved: Any) -> None:
        """Do the second half: W."""

    def nbytes(self, saved: Any) -> int:
        """Count the bytes that a microbatch keeps, see :class:`~mpidist.pipeline.PipelineStats`."""


def stage_of(module: Any, where: str, comm: Any = None) -> Stage:
    """Give the stage of a module, which may be in a :class:`~mpidist.parallel.DDP`.

    `where` begins the error message if it cannot be one; `comm` is who will send for it, if
    anybody.
    """
    made = _stage_of(module, where)
    if comm is not None:
        made.tensors.direct = partial(takes_addresses, comm.backend)  # type: ignore[attr-defined]
    return made


def _stage_of(module: Any, where: str) -> Stage:
    bare = module.module if isinstance(module, DDP) else module
    return adapter(library(bare), "stage").stage(bare, module, where)


class _Wanting:
    """Tensors that no graph tells of: gradients are asked for all that can have them."""

    def __init__(self, tensors: Tensors):
        self._form, self.array, self.own = tensors.form, tensors.array, tensors.own
        self.empty, self.tensor, self.result = tensors.empty, tensors.tensor, tensors.result

    def form(self, x: Any) -> tuple[str, tuple[int, ...], bool]:
        """Give the form."""
        dtype, shape, _ = self._form(x)
        return dtype, shape, "float" in dtype or "complex" in dtype


class Remembered(Held):
    """What is enough to compute a forward again."""

    __slots__ = ("value", "tree", "leaves", "moment", "loss", "inner")

    def __init__(self, value: Any, tree: Any, leaves: list[Any], moment: Any):
        self.value, self.tree, self.leaves, self.moment = value, tree, leaves, moment
        self.loss: Any = None
        self.inner: Any = None


class Recomputing:
    """Activation recomputation around a stage (see :class:`~.stage.Stage`)."""

    def __init__(self, stage: Stage):
        self._stage, self.module = stage, stage.module
        self.tensors = _Wanting(stage.tensors)

    @property
    def splits(self) -> bool:
        """Whether backward can be done in halves."""
        return self._stage.splits

    @property
    def training(self) -> bool:
        """Whether the module is in training."""
        return self._stage.training

    @property
    def differentiates(self) -> bool | None:
        """Whether a graph could be made now."""
        return self._stage.differentiates

    def forward(
        self, value: Any, tree: Any, leaves: list[Any], keep: bool, ends: bool = False
    ) -> tuple[Any, Remembered | None]:
        """Compute the output and keep the input."""
        if not keep:
            return self._stage.forward(value, tree, leaves, False)
        output, moment = self._stage.draft(value)
        return output, Remembered(value, tree, leaves, moment)

    def draft(self, value: Any) -> tuple[Any, Any]:
        """Compute the output only."""
        return self._stage.draft(value)

    def again(self, moment: Any) -> AbstractContextManager[Any]:
        """Give the context of a second forward."""
        return self._stage.again(moment)

    def finish(self, saved: Remembered, tree: Any, outputs: list[Any]) -> None:
        """Do nothing: outputs are made again."""

    def attach_loss(self, saved: Remembered, output: Any, loss: Any) -> float:
        """Compute the loss, now for its value and later for its gradient."""
        saved.loss = loss
        return loss.value(output)

    def backward(self, saved: Remembered, grads: list[Any] | None) -> list[Any]:
        """Go forward, then back."""
        return self._stage.backward(self._again(saved), grads)

    def backward_input(self, saved: Remembered, grads: list[Any] | None) -> list[Any]:
        """Go forward, then do the first half of the way back."""
        return self._stage.backward_input(self._again(saved), grads)

    def backward_weight(self, saved: Remembered) -> None:
        """Do the second half."""
        self._stage.backward_weight(saved.inner)

    def nbytes(self, saved: Remembered) -> int:
        """Count the bytes of the input; once there is a second forward, what that keeps."""
        if saved.inner is None:
            return sum([x.nbytes for x in saved.leaves])
        return self._stage.nbytes(saved.inner)

    def _again(self, saved: Remembered) -> Any:
        stage, ends = self._stage, saved.loss is not None
        with stage.again(saved.moment):
            output, inner = stage.forward(saved.value, saved.tree, saved.leaves, True, ends)
            if ends:
                stage.attach_loss(inner, output, saved.loss)
            else:
                stage.finish(inner, *flatten(output))
        saved.inner = inner
        saved.value, saved.tree, saved.leaves, saved.moment = None, None, [], None
        saved.resize(self.nbytes(saved))
        return inner

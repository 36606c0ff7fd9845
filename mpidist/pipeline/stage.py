"""A stage as the executor sees it: forward of one microbatch, and its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property, partial
from typing import Any, Protocol

from ..communicator.communicator import Communicator
from ..device.recognise import is_on_device
from ..frameworks.base import adapter, library
from ..gpu.messages import TensorMessages, takes_addresses
from ..parallel.ddp import DDP
from .loss import MicrobatchLoss
from .values import Tensors, Tree


class SavedActivations:
    """Activations that a chunk keeps of one microbatch, from forward to the end of backward.

    The stage of each library has its own subclass.  The executor counts the objects that are alive;
    the largest number is `peak_live` of the statistics.
    """

    __slots__ = ("inputs", "__weakref__")

    def __init__(self, inputs: list[Any]):
        self.inputs = inputs  # tensors from another stage; empty for the first one


GPU_SUFFIX = "@gpu"
"""Suffix of a dtype's name in a message: the sender has the tensor on a GPU."""


class DevicePlace:
    """The device of a stage's tensors: that of its parameters or, without any, the sender's."""

    def __init__(self, parameters: Iterable[Any] = ()):
        places = [is_on_device(p.data) for p in parameters]
        self.on_gpu: bool | None = any(places) if places else None  # None: no parameters
        # Whether the MPI library takes addresses on a GPU; asked only if a tensor is on one.
        self.direct: Callable[[], bool] = bool

    @cached_property
    def tensor_messages(self) -> TensorMessages:
        """The object that copies tensors between a GPU and messages."""
        return TensorMessages(self.direct())

    def place(self, dtype: str) -> tuple[str, bool]:
        """Return the name of a received dtype, and whether the tensor is to be on a GPU here.

        `dtype` ends with :data:`GPU_SUFFIX` if the sender has the tensor on a GPU; the name is the
        part before it.
        """
        senders = dtype.endswith(GPU_SUFFIX)
        return dtype.removesuffix(GPU_SUFFIX), senders if self.on_gpu is None else self.on_gpu


class Stage(Protocol):
    """One chunk of the model on this rank; `module` is the chunk itself, without a wrapper."""

    module: Any

    @property
    def splits(self) -> bool:
        """Whether backward can run in two halves; if not, :meth:`backward_input` does all of it."""

    @property
    def tensors(self) -> Tensors:
        """Conversion between this stage's tensors and messages."""

    @property
    def training(self) -> bool:
        """Whether the module is in training mode."""

    @property
    def differentiates(self) -> bool | None:
        """Whether the library currently records a graph; None without autograd."""

    def forward(
        self,
        tree: Tree,
        tensors: list[Any],
        first: bool,
        keep: bool,
        loss: MicrobatchLoss | None = None,
    ) -> tuple[Any, Any]:
        """Return the output of a microbatch, or its loss; and with `keep` its SavedActivations.

        `tree` and `tensors` are the input, see :func:`~.values.flatten`; on the `first` stage it is
        the user's and needs no gradient.  `keep` is whether a backward follows.  With `loss`, on
        the last stage of a step, the result is a float, and backward begins there.
        """

    def finish(self, saved: Any, tree: Tree, outputs: list[Any]) -> None:
        """Record in `saved` what backward needs of the output, given as `tree` and its tensors.

        The `grads` of :meth:`backward` are the gradients of `outputs`, in this order.
        """

    def backward(self, saved: Any, grads: list[Any] | None) -> list[Any]:
        """Compute the gradients of inputs and parameters (action B); return those of the inputs.

        `grads` are those of the outputs (None in it for zeros), or None to begin at the loss.  A
        result is None where an input has no gradient, else in memory that nothing else uses.  Empty
        on the first stage.
        """

    def backward_input(self, saved: Any, grads: list[Any] | None) -> list[Any]:
        """Compute the gradients of the inputs, the first half of backward (action I).

        Parameters and result are those of :meth:`backward`.
        """

    def backward_weight(self, saved: Any) -> None:
        """Compute the gradients of the parameters, the second half of backward (action W)."""


def stage_of(
    module: Any, where: str, comm: Communicator | None = None, checkpoint: bool = False
) -> Stage:
    """Return the stage that runs a module, by its library; the module may be in a DDP.

    `where`, rank and chunk, begins error messages; `comm` sends the stage's tensors, if they are
    sent.  With `checkpoint` only the input of a microbatch is kept, and backward computes forward
    again.
    """
    bare = module.module if isinstance(module, DDP) else module
    stage: Stage = adapter(library(bare), "stage").stage(bare, module, where, checkpoint)
    if comm is not None:
        stage.tensors.direct = partial(takes_addresses, comm.backend)  # type: ignore[attr-defined]
    return stage

"""Modules of PyTorch: their gradients are views of buffers that numpy and MPI share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..communicator.communicator import Communicator
from ..device import tensors
from ..errors import MpidistError, Unsupported
from ..frameworks.base import Remove, digest, why_not_plain
from ..shared_memory import compiled
from . import sparse

ELEMENTWISE = (
    "SGD",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "Adagrad",
    "Adadelta",
    "RMSprop",
    "Rprop",
    "ASGD",
)
"""Optimizers that update every element of a parameter from the history of that element alone."""

DEVICE = "cuda"  # PyTorch's name of the current GPU


def is_on_gpu(x: Any) -> bool:
    """Return whether a tensor is on a GPU; False if it is in host memory."""
    return x.is_cuda


def stream_of(x: Any) -> int:
    """Return the handle of the CUDA stream on which this thread's work on the GPU of `x` runs."""
    return torch.cuda.current_stream(x.device).cuda_stream


def on_side_stream(
    act: Callable[[], object], x: Any, streams: dict[torch.device, Any]
) -> Callable[[], None]:
    """Return a function that runs `act` on a CUDA stream of `streams`, for another thread to call.

    `act` gets a stream on the device of `x`, ordered after what this thread has queued on its own
    stream up to now.  The function returns when the GPU has done the work of `act`, so that every
    stream may use the result, and the memory that `act` used may be freed.  A device's stream is
    made at its first use and kept: PyTorch caches freed memory for each stream by itself.
    """
    ready = torch.cuda.current_stream(x.device).record_event()

    def run() -> None:
        side = streams.get(x.device)
        if side is None:
            side = streams[x.device] = torch.cuda.Stream(x.device)
        with torch.cuda.stream(side):
            side.wait_event(ready)
            try:
                act()
            finally:
                side.synchronize()

    return run


def tensor_on(array: Any, x: Any) -> Any:
    """Return a tensor with the dtype of `x` on the memory of `array`, bytes of any library."""
    return torch.from_dlpack(array).view(x.dtype)


def as_array(x: torch.Tensor) -> np.ndarray:
    """Return a numpy array on the memory of a tensor; bfloat16 is the dtype of ml_dtypes.

    Unsupported if the tensor is not in host memory, or numpy does not have its dtype.
    """
    try:
        return tensors.as_array(x)
    except MpidistError as error:
        raise Unsupported(f"not supported: {error}") from None


def _array(x: torch.Tensor) -> Any:
    """Return an array for a communicator: a NumPy array, or the tensor itself if it is on a GPU."""
    return x.detach() if is_on_gpu(x) else as_array(x)


def _tensor(flat: Any, dtype: torch.dtype) -> torch.Tensor:
    return flat if isinstance(flat, torch.Tensor) else tensors.as_tensor(flat, dtype)


class Torch:
    """Adapter for modules of PyTorch; see :class:`~mpidist.frameworks.base.Framework`."""

    def parameters(self, module: Any) -> list[tuple[str, Any]]:
        """Return names and parameters that require a gradient, each parameter once.

        Those of :meth:`ignored` are left out.
        """
        named = self._without_ignored(module, module.named_parameters())
        return [(name, p) for name, p in named if p.requires_grad]

    def ignored(self, module: Any) -> set[str]:
        """Return the names of parameters and buffers that ``DistributedDataParallel`` ignores.

        Its ``_set_params_and_buffers_to_ignore_for_model`` has stored them in the module.
        """
        return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))

    def _without_ignored(
        self, module: Any, named: Iterable[tuple[str, torch.Tensor]]
    ) -> list[tuple[str, torch.Tensor]]:
        ignored = self.ignored(module)
        return [(name, x) for name, x in named if name not in ignored]

    def why_not(self, module: Any) -> str:
        """Return why a module cannot be wrapped, "" if it can.

        TorchScript ignores hooks, a torch.nn.SyncBatchNorm needs torch.distributed, and parameters
        and buffers must be the memory they show.
        """
        for name, m in module.named_modules():
            if isinstance(m, torch.nn.SyncBatchNorm) and not _distributed():
                return (
                    f"{name or 'it'} is a torch.nn.SyncBatchNorm, which is local where "
                    "torch.distributed is not initialised: expected the result of "
                    "mpidist.torch.SyncBatchNorm.convert_sync_batchnorm(module, comm)"
                )
        if isinstance(module, torch.jit.ScriptModule):
            return (
                f"a {type(module).__name__}, as torch.jit.script and torch.jit.trace make them: "
                "expected the original module (torch.compile works on it)"
            )
        every = [*module.named_parameters(), *module.named_buffers()]
        return why_not_plain(self._without_ignored(module, every))

    def sparse(self, module: Any) -> list[str]:
        """Return the names of parameters of embeddings that were made with ``sparse=True``."""
        kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
        made = {id(m.weight) for m in module.modules() if isinstance(m, kinds) and m.sparse}
        return [name for name, p in self.parameters(module) if id(p) in made]

    def average_sparse(self, comm: Communicator, parameters: Sequence[Any], zeros: bool) -> None:
        """Replace sparse gradients by their means over the ranks; collective.

        With `zeros` a gradient that is None on all ranks becomes an empty sparse tensor.
        """
        sparse.average(comm, parameters, zeros)

    def without_shape(self, module: Any) -> list[str]:
        """Return the names of a lazy module's parameters and buffers that have no shape yet."""
        every = [*module.named_parameters(), *module.named_buffers()]
        named = self._without_ignored(module, every)
        return [name for name, x in named if torch.nn.parameter.is_lazy(x)]

    def registries(self, module: Any) -> list[Any]:
        """Return the dicts of parameters and submodules of the module and all its submodules."""
        return [place for m in module.modules() for place in (m._parameters, m._modules)]

    def buffers(self, module: Any) -> list[tuple[str, np.ndarray]]:
        """Return (name, buffer) pairs: tensors if on a GPU, else NumPy arrays on their memory."""
        named = self._without_ignored(module, module.named_buffers())
        return [(name, _array(b)) for name, b in named if b is not None]

    def threads(self) -> int:
        """Return the number of threads of an operation, by which a sum may be divided."""
        return torch.get_num_threads()

    def as_array(self, x: Any) -> np.ndarray:
        """Return a numpy array on the memory of a tensor in host memory."""
        return as_array(x)

    def from_array(self, array: np.ndarray) -> Any:
        """Return a tensor on the memory of a numpy array."""
        return tensors.as_tensor(array)

    def values(self, p: Any) -> Any:
        """Return a numpy array on the parameter's memory; on a GPU the detached tensor."""
        return _array(p)

    def digest(self, p: Any) -> tuple[int, ...]:
        """Return the :func:`~mpidist.frameworks.base.digest` of the parameter's values."""
        # Of most parameters without a numpy array, which takes as long as to read 200 KB.
        if type(p) in tensors.PLAIN and p.is_cpu and p.is_contiguous() and compiled.runs_steps():
            return compiled.function("digest")(p.data_ptr(), p.nbytes)
        return digest(_array(p))

    def kind(self, p: Any) -> Hashable:
        """Return dtype and type of device, without a GPU's number, which differs between ranks."""
        return f"{p.dtype} on {p.device.type}" if is_on_gpu(p) else str(p.dtype)

    def zeros(self, p: Any, count: int) -> Any:
        """Return a flat array of `count` zeros: a NumPy array, or a tensor on the GPU of `p`."""
        if is_on_gpu(p):
            return torch.zeros(count, dtype=p.dtype, device=p.device)
        return np.zeros(count, as_array(p).dtype)

    def view(self, flat: Any, start: int, p: Any) -> Any:
        """Return elements of a flat array, from `start` on, as a tensor in the shape of `p`."""
        return _tensor(flat, p.dtype)[start : start + p.numel()].view(p.shape)

    def flat_parameter(self, flat: Any, gradient: Any, start: int, stop: int) -> Any:
        """Return a Parameter of the elements `start` to `stop` of `flat`, without a copy.

        The same elements of `gradient` are the Parameter's ``.grad``.
        """
        if isinstance(flat, torch.Tensor):
            dtype = flat.dtype
        elif flat.dtype.name == "bfloat16":
            dtype = torch.bfloat16
        else:
            dtype = torch.from_numpy(flat).dtype
        parameter = torch.nn.Parameter(_tensor(flat, dtype)[start:stop])
        parameter.grad = _tensor(gradient, dtype)[start:stop]
        return parameter

    def stream(self, p: Any) -> int | None:
        """Return PyTorch's current CUDA stream on the GPU of `p`; None if `p` is in host memory."""
        return stream_of(p) if is_on_gpu(p) else None

    def from_device(self, array: Any, p: Any) -> Any:
        """Return a tensor on the memory of `array`, bytes on a GPU, with the dtype of `p`."""
        return tensor_on(array, p)

    def place(self, value: Any, p: Any) -> Any:
        """Return `value`, a tensor of a loaded state, on the device of `p`."""
        return value.to(p.device)

    def copy(self, view: Any, gradient: Any) -> None:
        """Copy a gradient into `view`: as a dense tensor if it is sparse, and without its graph."""
        gradient = tensors.unwrapped(gradient).detach()
        view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)

    def clear(self, p: Any) -> None:
        """Fill the gradient with zeros, and detach it from its graph."""
        if p.grad.requires_grad:
            p.grad = p.grad.detach()
        p.grad.zero_()

    def changes(self, x: Any) -> int | None:
        """Return how often a tensor was changed in place by PyTorch so far, as autograd counts."""
        return x._version

    def on_gradient(self, p: Any, act: Callable[[], object]) -> Remove | None:
        """Call `act` after each addition to the gradient of `p`; return a function to stop that."""
        return p.register_post_accumulate_grad_hook(partial(_ignoring, act)).remove

    def on_forward(self, module: Any, act: Callable[[], object]) -> Remove | None:
        """Call `act` before each forward of `module` that a backward may follow.

        Return a function to stop that.
        """
        return module.register_forward_pre_hook(partial(_with_gradients, act)).remove

    def on_step(self, act: Callable[[Iterable[Any]], object]) -> Remove:
        """Call ``act(parameters)`` before each step of any optimizer of PyTorch.

        Return a function to stop that.
        """
        key = object()
        _BEFORE_STEPS[key] = act
        return partial(_BEFORE_STEPS.pop, key, None)

    def is_elementwise(self, optimizer: Any) -> bool:
        """Return whether an optimizer class is one of :data:`ELEMENTWISE`.

        Those classes of PyTorch update each element from the history of that element alone.
        """
        return optimizer in [getattr(torch.optim, name) for name in ELEMENTWISE]

    def optimizer_state(self, optimizer: Any, p: Any) -> dict[str, Any]:
        """Return the dict in which the optimizer holds a parameter's state, not a copy of it."""
        return optimizer.state[p]

    def set_parameters(self, optimizer: Any, groups: Sequence[Sequence[Any]]) -> None:
        """Replace the parameters of each group, whose options stay; clear the optimizer's state."""
        for group, parameters in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = list(parameters)
        optimizer.state.clear()


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _with_gradients(act: Callable[[], object], *_: Any) -> None:
    """Call `act` unless this thread records no graph, as in ``torch.no_grad()``; return None."""
    if torch.is_grad_enabled():
        act()


def _ignoring(act: Callable[[], object], *_: Any) -> None:
    """Call `act` without the hook's arguments; return None, by which a hook changes nothing."""
    act()


_BEFORE_STEPS: dict[object, Callable[[Iterable[Any]], object]] = {}


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Call each function of `_BEFORE_STEPS` with the parameters of an optimizer."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for act in list(_BEFORE_STEPS.values()):
        act(parameters)


# Once: a step in another thread must not see PyTorch's own table change.
register_optimizer_step_pre_hook(_before_step)

FRAMEWORK = Torch()

"""Modules of PyTorch: gradients are views of buffers that numpy and MPI see as well."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ..device import tensors
from ..errors import MpidistError, Unsupported
from ..frameworks.base import Remove

DEVICE = "cuda"  # the current one


def is_there(x: Any) -> bool:
    """Tell whether a tensor is on a GPU."""
    return x.is_cuda


def stream_of(x: Any) -> int:
    """Give the stream that PyTorch queues work of this thread on now."""
    return torch.cuda.current_stream(x.device).cuda_stream


def tensor_on(array: Any, x: Any) -> Any:
    """Give a tensor of `x`'s dtype on the memory of another library's array of bytes."""
    return torch.from_dlpack(array).view(x.dtype)


def as_array(x: torch.Tensor) -> np.ndarray:
    """Give a tensor as a numpy array that shares its memory; bfloat16 is that of ml_dtypes.

    Raises
    ------
    Unsupported
        For tensors that are not in host memory, and dtypes that numpy does not know.
    """
    try:
        return tensors.as_array(x)
    except MpidistError as error:
        raise Unsupported(f"not supported: {error}") from None


def as_tensor(flat: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Give a flat numpy array as a tensor that shares its memory and keeps it alive."""
    if dtype == torch.bfloat16:
        return torch.from_numpy(flat.view(np.int16)).view(dtype)
    return torch.from_numpy(flat)


def _array(x: torch.Tensor) -> Any:
    """Give what communicators take: a numpy array, or a tensor on a GPU."""
    return x.detach() if is_there(x) else as_array(x)


def _tensor(flat: Any, dtype: torch.dtype) -> torch.Tensor:
    return flat if isinstance(flat, torch.Tensor) else as_tensor(flat, dtype)


class Torch:
    """Parameters of a :class:`torch.nn.Module` (see :class:`~mpidist.frameworks.base`)."""

    def parameters(self, module: Any) -> list[tuple[str, Any]]:
        """List the parameters that require a gradient, each once."""
        return [(name, p) for name, p in module.named_parameters() if p.requires_grad]

    def refusal(self, module: Any) -> str:
        """Refuse what TorchScript has made: it does not call hooks before forward as modules do."""
        if not isinstance(module, torch.jit.ScriptModule):
            return ""
        return (
            f"a {type(module).__name__}, as torch.jit.script and torch.jit.trace make them: "
            "allowed is the module before that (torch.compile works on it)"
        )

    def unready(self, module: Any) -> list[str]:
        """Name those that a lazy module makes at its first call."""
        every = [*module.named_parameters(), *module.named_buffers()]
        return [name for name, x in every if torch.nn.parameter.is_lazy(x)]

    def places(self, module: Any) -> list[Any]:
        """List what every module inside registers."""
        return [place for m in module.modules() for place in (m._parameters, m._modules)]

    def buffers(self, module: Any) -> list[tuple[str, np.ndarray]]:
        """List the buffers: those on a GPU are tensors, the others arrays of numpy."""
        return [(name, _array(b)) for name, b in module.named_buffers() if b is not None]

    def as_array(self, x: Any) -> np.ndarray:
        """Return a numpy array on the memory of a tensor in host memory."""
        return as_array(x)

    def from_array(self, array: np.ndarray) -> Any:
        """Return a tensor on the memory of a numpy array."""
        return tensors.as_tensor(array)

    def values(self, p: Any) -> Any:
        """Give the memory as numpy array; of a GPU the tensor, without its graph."""
        return _array(p)

    def kind(self, p: Any) -> Hashable:
        """Tell dtypes apart, and the host from a GPU, whose number may differ between ranks."""
        return f"{p.dtype} on {p.device.type}" if is_there(p) else str(p.dtype)

    def like(self, p: Any, count: int) -> Any:
        """Make an array of numpy, or a tensor on the GPU."""
        if is_there(p):
            return torch.zeros(count, dtype=p.dtype, device=p.device)
        return np.zeros(count, as_array(p).dtype)

    def view(self, flat: Any, start: int, p: Any) -> Any:
        """Give a tensor in the shape of `p`."""
        return _tensor(flat, p.dtype)[start : start + p.numel()].view(p.shape)

    def piece(self, flat: Any, gradient: Any, start: int, stop: int) -> Any:
        """Give a :class:`torch.nn.Parameter`."""
        if isinstance(flat, torch.Tensor):
            dtype = flat.dtype
        elif flat.dtype.name == "bfloat16":
            dtype = torch.bfloat16
        else:
            dtype = torch.from_numpy(flat).dtype
        made = torch.nn.Parameter(_tensor(flat, dtype)[start:stop])
        made.grad = _tensor(gradient, dtype)[start:stop]
        return made

    def stream(self, p: Any) -> int | None:
        """Ask PyTorch."""
        return stream_of(p) if is_there(p) else None

    def on_device(self, array: Any, p: Any) -> Any:
        """Give a tensor on the same memory."""
        return tensor_on(array, p)

    def placed(self, value: Any, p: Any) -> Any:
        """Copy to the GPU, if the parameter is there."""
        return value.to(p.device)

    def copy(self, view: Any, gradient: Any) -> None:
        """Copy; a gradient that has a graph or is sparse becomes a plain one."""
        gradient = gradient.detach()
        view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)

    def clear(self, p: Any) -> None:
        """Fill with zeros; a gradient that has a graph loses it."""
        if p.grad.requires_grad:
            p.grad = p.grad.detach()
        p.grad.zero_()

    def on_gradient(self, p: Any, act: Callable[[], object]) -> Remove | None:
        """Have `act` called when autograd has added to the gradient."""
        return p.register_post_accumulate_grad_hook(partial(_ignoring, act)).remove

    def on_forward(self, module: Any, act: Callable[[], object]) -> Remove | None:
        """Have `act` called before each forward of the module itself."""
        return module.register_forward_pre_hook(partial(_ignoring, act)).remove

    def optimizer_state(self, optimizer: Any, p: Any) -> dict[str, Any]:
        """Give the optimizer's own entry."""
        return optimizer.state[p]

    def hand_over(self, optimizer: Any, groups: Sequence[Sequence[Any]]) -> None:
        """Put the parameters into the groups, which keep their options."""
        for group, parameters in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = list(parameters)
        optimizer.state.clear()


def _ignoring(act: Callable[[], object], *_: Any) -> None:
    """Call `act`, whatever the hook is told; hooks that give None change nothing."""
    act()


FRAMEWORK = Torch()

"""Taps on models of PyTorch, for ``mpidist check``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader, DistributedSampler

from ..data import Order
from ..frameworks.base import Framework
from ..oracle.taps import Taps
from ..parallel import DDP
from .batchnorm import SyncBatchNorm
from .framework import FRAMEWORK


def _parameters(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _before_step(taps: Taps, optimizer: Any, arguments: Any, options: Any) -> Any:
    """Record the gradients before a step; if a closure computes them, when it has done so."""
    taps.join(LIBRARY, optimizer, _parameters(optimizer))
    position = "closure" not in options and len(arguments) > 1
    closure = arguments[1] if position else options.get("closure")
    if closure is None:
        taps.before_step(optimizer, _parameters(optimizer))
        return None

    def computed() -> Any:
        result = closure()
        taps.before_step(optimizer, _parameters(optimizer))
        return result

    if position:
        return (arguments[0], computed, *arguments[2:]), options
    return arguments, {**options, "closure": computed}


class TorchLibrary:
    """What the taps must know of PyTorch: see :class:`~mpidist.oracle.taps.Library`."""

    framework: Framework = FRAMEWORK

    def install(self, taps: Taps) -> None:
        """Replace the calls of modules and of backward, and register hooks on optimizers."""
        call, backward = torch.nn.Module.__call__, torch.Tensor.backward
        wrap, load = DistributedDataParallel.__init__, DataLoader.__init__

        @wraps(call)
        def tapped_call(module: Any, *inputs: Any, **options: Any) -> Any:
            return taps.call(self, call, module, inputs, options)

        @wraps(backward)
        def tapped_backward(tensor: Any, *arguments: Any, **options: Any) -> Any:
            if tensor.numel() == 1:
                taps.loss(float(tensor.detach()))
            return backward(tensor, *arguments, **options)

        @wraps(wrap)
        def tapped_wrap(wrapper: Any, module: Any, *arguments: Any, **options: Any) -> None:
            taps.know(self, module)
            wrap(wrapper, module, *arguments, **options)
            taps.writer.facts(wrapper="DistributedDataParallel")

        @wraps(load)
        def tapped_load(
            loader: Any, dataset: Any, batch_size: int | None = 1, *arguments: Any, **options: Any
        ) -> None:
            sampler = options.get("sampler", arguments[1] if len(arguments) > 1 else None)
            if isinstance(sampler, (DistributedSampler, Order)):
                taps.writer.facts(loader=True)
                if isinstance(sampler, DistributedSampler):
                    taps.writer.facts(shards=sampler.num_replicas)
                whole = isinstance(sampler, Order) and sampler.block
                if taps.plan.role != "ranks" and not (taps.plan.copies or whole) and batch_size:
                    # The samples of all ranks are those of one process, in the same order.
                    batch_size *= taps.plan.shares
            load(loader, dataset, batch_size, *arguments, **options)

        torch.nn.Module.__call__ = tapped_call  # type: ignore
        torch.Tensor.backward = tapped_backward  # type: ignore
        DistributedDataParallel.__init__ = tapped_wrap  # type: ignore
        DataLoader.__init__ = tapped_load  # type: ignore
        register_optimizer_step_pre_hook(partial(_before_step, taps))
        register_optimizer_step_post_hook(
            lambda optimizer, *_: taps.after_step(self, optimizer, _parameters(optimizer))
        )

    def is_wrapper(self, module: Any) -> bool:
        """Return whether a module is a DDP, of mpidist or of PyTorch."""
        return isinstance(module, (DDP, DistributedDataParallel))

    def is_recorded(self, module: Any) -> bool:
        """Return whether a backward may follow: not in evaluation, nor within a backward pass."""
        if not module.training or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        return torch._C._current_graph_task_id() == -1

    def modules(self, model: Any) -> Iterable[tuple[str, Any]]:
        """Return names and modules of a model."""
        return model.named_modules()

    def trait(self, module: Any) -> str:
        """Return "batch statistics", "dropout" or ""."""
        if not module.training:
            return ""
        if isinstance(module, _BatchNorm):
            synced = isinstance(module, (SyncBatchNorm, torch.nn.SyncBatchNorm))
            return "" if synced else "batch statistics"
        return "dropout" if isinstance(module, _DropoutNd) and module.p > 0 else ""

    def random_state(self) -> bytes:
        """Return the state of PyTorch's default generator."""
        return torch.get_rng_state().numpy().tobytes()

    def states(self, optimizer: Any) -> dict[int, Mapping[str, Any]]:
        """Return the state of an optimizer, by the id of the parameter."""
        return {id(p): state for p, state in optimizer.state.items()}

    def extend(self, optimizer: Any, parameters: Sequence[Any]) -> bool:
        """Give an optimizer of one group more parameters; return whether it has only one."""
        if len(optimizer.param_groups) == 1:
            optimizer.param_groups[0]["params"].extend(parameters)
        return len(optimizer.param_groups) == 1


def seed(number: int) -> None:
    """Seed PyTorch's generators."""
    torch.manual_seed(number)


LIBRARY = TorchLibrary()

"""A DDP of a module of PyTorch: itself a torch.nn.Module; averages gradients as backward ends."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.utils._pytree import tree_leaves

from .. import arguments
from ..checkpoint.state import read_all
from ..errors import InvalidArgument
from ..frameworks.base import Remove, WeakHook
from ..parallel.array_wrapper import no_attribute
from ..parallel.reducer import Phase
from .comm_hook import CommHook

if TYPE_CHECKING:
    from ..communicator.communicator import Communicator
    from ..parallel.reducer import Reducer

MEANINGS: dict[str, Any] = {
    "find_unused_parameters": {True: {"unused": "skip"}, False: {"unused": "error"}},
    "broadcast_buffers": {True: {"buffers": "broadcast"}, False: {"buffers": "keep"}},
    "forward_sync_buffers": {True: {"buffers": "broadcast"}, False: {"buffers": "keep"}},
    "gradient_as_bucket_view": {True: {}},
    "process_group": "the ranks are those of the argument comm",
    "device_mesh": "the ranks are those of the argument comm",
    "device_ids": "parameters stay where they are: move the module before wrapping it",
    "output_device": "outputs stay where they are",
    "mixed_precision": "use torch.autocast",
    "bucket_cap_mb": "use bucket_bytes",
    "delay_all_reduce_named_params": "every parameter that requires a gradient is averaged",
}
"""For each option of ``DistributedDataParallel``: the options of DDP for each value, or a reason.

The reason says why only None is allowed.
"""

DEFAULTS = {"unused": "skip", "buffers": "broadcast"}

PREFIX = "module."  # of names in the state of DistributedDataParallel, and of this wrapper


class Wrapper(torch.nn.Module):
    """A module with one submodule, ``module``, as ``DistributedDataParallel`` is.

    The gradients are averaged in a callback of the autograd engine, at the end of a backward pass::

        forward          registers a hook on each output
        backward         the first hook to run, of an output or of a parameter, queues the callback
        end of backward  the callback averages, if the pass has added to a gradient

    The hooks on outputs are for reentrant checkpoints.  Each of these has a backward pass of its
    own inside the whole one, and a callback runs at the end of the pass in which it was queued.
    """

    if TYPE_CHECKING:  # of DDP
        module: torch.nn.Module
        reducer: Reducer
        sync: str
        comm: Communicator

        def _end_backward(self) -> None: ...
        def _refuse_microbatches(self, what: str) -> None: ...

    def watch(self) -> Remove:
        """Register hooks that average gradients after each backward pass, unless sync="manual".

        Return a function that removes the hook on the forward of ``module``.
        """
        self.reducer.on_backward = WeakHook(self._begin_backward)
        hook = partial(_with_output, WeakHook(self._watch_output))
        return self.module.register_forward_hook(hook).remove

    def _watch_output(self, output: Any) -> None:
        """Register a hook on every output from which a backward pass can begin."""
        if self.sync != "auto" or not torch.is_grad_enabled():
            return
        begin = partial(_at_gradient, WeakHook(self._begin_backward))
        for x in tree_leaves(output):
            if isinstance(x, torch.Tensor) and x.grad_fn is not None:
                x.register_hook(begin)

    def _begin_backward(self) -> None:
        """Queue the averaging of gradients, once, for the end of the running backward pass."""
        reducer = self.reducer
        if self.sync == "auto" and reducer.enabled and not reducer.queued:
            reducer.queued = True
            Variable._execution_engine.queue_callback(self._at_end)

    def _at_end(self) -> None:
        """Average the gradients at the end of a backward pass, if it has added to a gradient.

        ``torch.autograd.grad`` does not: it returns gradients.
        """
        self.reducer.queued = False
        if self.reducer.phase not in (Phase.IDLE, Phase.AVERAGED):
            self._end_backward()

    @staticmethod
    def in_backward() -> bool:
        """Return whether this thread is in a backward pass, such as in a hook of a gradient."""
        return torch._C._current_graph_task_id() != -1

    # -- the module -------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Call the module's forward, and return its output."""
        return self.module(*inputs, **options)

    def __getattr__(self, name: str) -> Any:
        """Return a submodule; AttributeError points to ``model.module`` if it has the attribute."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            text = no_attribute(self, vars(self).get("_modules", {}), name)
            raise AttributeError(text, name=name, obj=self) from None

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Apply a conversion `fn` to parameters and buffers, as ``.to()`` does.

        Raises InvalidArgument if a parameter's dtype or device would change.
        """
        for name, p in self.module.named_parameters():
            with torch.no_grad():
                found = fn(p.detach()[..., :0] if p.dim() else p.detach())
            if (found.dtype, found.device) != (p.dtype, p.device):
                raise InvalidArgument(
                    f"rank {self.comm.rank}: {name} is {p.dtype} on {p.device}, as it was wrapped, "
                    f"and would become {found.dtype} on {found.device}: convert the module before "
                    "md.DDP(module, comm)"
                )
        return super()._apply(fn, recurse)

    def load_module_state(
        self, state: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the state of a module, of this wrapper, or of ``DistributedDataParallel``.

        Return the result of the module's ``load_state_dict``.  With `assign` raise InvalidArgument.
        """
        if assign:
            raise InvalidArgument(
                f"rank {self.comm.rank}: load_state_dict(assign=True) replaces the parameters that "
                "were wrapped: expected assign=False"
            )
        own = set(self.module.state_dict())
        inner = {name.removeprefix(PREFIX) for name in state if name.startswith(PREFIX)}
        whole = OrderedDict(read_all(state))
        # Whichever form has more of the names: a module's own may begin with "module.", too.
        if len(inner & own) > len(set(state) & own):
            metadata = getattr(state, "_metadata", None)
            if metadata is not None:
                whole._metadata = OrderedDict(metadata)  # type: ignore[attr-defined]
            consume_prefix_in_state_dict_if_present(whole, PREFIX)
        elif hasattr(state, "_metadata"):
            whole._metadata = state._metadata  # type: ignore[attr-defined]
        return self.module.load_state_dict(whole, strict=strict)

    # -- names of DistributedDataParallel ---------------------------------------------------------

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether gradients are averaged; False stands for :meth:`no_sync`, without a block."""
        return self.reducer.enabled

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._refuse_microbatches("require_backward_grad_sync")
        self.reducer.enabled = bool(value)

    @staticmethod
    def accept_options(others: Mapping[str, Any], options: dict[str, Any], rank: int) -> None:
        """Translate `others`, options of ``DistributedDataParallel``, and store them in `options`.

        InvalidArgument if a name or value is unknown, or contradicts one of `options`.
        """
        for name, value in others.items():
            if name not in MEANINGS:
                raise InvalidArgument(
                    f"rank {rank}: DDP has no option {name}: expected one of "
                    f"{', '.join([*options, *MEANINGS])}"
                )
            meaning = MEANINGS[name]
            if isinstance(meaning, str):
                if value is not None:
                    raise InvalidArgument(
                        f"rank {rank}: {name}={value!r}: expected None: {meaning}"
                    )
                continue
            if value not in meaning or not isinstance(value, bool):
                expected = " or ".join(map(str, meaning))
                raise InvalidArgument(
                    f"rank {rank}: {name}={value!r}: expected {expected}"
                    + (": gradients are always views of buckets" if len(meaning) == 1 else "")
                )
            for own, means in meaning[value].items():
                if options[own] not in (DEFAULTS[own], means):
                    raise InvalidArgument(
                        f"rank {rank}: {name}={value} means {own}={means!r}, but "
                        f"{own}={options[own]!r} is also given: expected one of the two"
                    )
                options[own] = means

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Average gradients by a communication hook of PyTorch, from the first step on.

        ``hook(state, bucket)`` takes a ``torch.distributed.GradBucket`` and returns a
        ``torch.futures.Future`` of one flat tensor, the mean of the bucket over the ranks.  Hooks
        of ``torch.distributed.algorithms`` communicate over ``torch.distributed``.
        """
        arguments.function("hook", hook, where=f"rank {self.comm.rank}: ")
        reducer = self.reducer
        reducer.use_hook(
            CommHook(state, hook, lambda: len(reducer.grouping.buckets), self.comm.rank)
        )


def _with_output(act: Callable[[Any], object], module: Any, inputs: Any, output: Any) -> None:
    """Call `act` with a module's output, as a forward hook; not while torch.compile traces it."""
    if not torch.compiler.is_compiling():
        act(output)


def _at_gradient(act: Callable[[], object], gradient: Any) -> None:
    """Call `act`, as a hook on a tensor; None is returned, so the gradient stays as it is."""
    act()

"""A DDP of a module of mpidist.nn, or of another object with ``parameters()``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from ..checkpoint.state import read_all
from ..errors import InvalidArgument

if TYPE_CHECKING:
    from ..frameworks.base import Framework
    from .reducer import Reducer


class Wrapper:
    """The module methods of a DDP, each of which calls the wrapped module's.

    ``backward`` ends with the averaging of the gradients, unless ``sync`` is "manual".
    """

    if TYPE_CHECKING:  # of DDP
        module: Any
        framework: Framework
        reducer: Reducer
        sync: str

        def _end_backward(self) -> None: ...

    @staticmethod
    def accept_options(others: Mapping[str, Any], options: dict[str, Any], rank: int) -> None:
        """Raise InvalidArgument if `others` is not empty.

        Only the DDP of a PyTorch module has more options, those of ``DistributedDataParallel``, and
        translates them into `options`.
        """
        if others:
            raise InvalidArgument(
                f"rank {rank}: DDP has no option {', '.join(others)}: expected {', '.join(options)}"
            )

    def watch(self) -> None:
        """Register no callback, and return None: :meth:`backward` itself averages the gradients."""

    @staticmethod
    def in_backward() -> bool:
        """Return False: only in PyTorch can an optimizer's step() be called within backward."""
        return False

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Call the module with its arguments, and return its output."""
        self.reducer.prepare()
        return self.module(*inputs, **options)

    def __getattr__(self, name: str) -> NoReturn:
        """Raise AttributeError, pointing to ``model.module`` if it has the attribute."""
        raise AttributeError(no_attribute(self, vars(self), name), name=name, obj=self)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Call the module's forward, and return its output."""
        self.reducer.prepare()
        return self.module.forward(*inputs, **options)

    def backward(self, grad: Any) -> Any:
        """Call the module's backward, then average the gradients; return the input's gradient.

        `grad` is the gradient of the loss with respect to the module's output.
        """
        result = self.module.backward(grad)
        if self.sync == "auto" and self.reducer.enabled:
            self._end_backward()
        return result

    def parameters(self) -> list[Any]:
        """Return the module's parameters."""
        return list(self.module.parameters())

    def named_parameters(self) -> list[tuple[str, Any]]:
        """Return (name, parameter) for each parameter whose gradient is averaged.

        A shared parameter appears once.  If the module has no names, indices are used as names.
        """
        return list(self.reducer.grouping.named)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None, or (False) to zeros in place."""
        for p in self.parameters():
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                self.framework.clear(p)

    def train(self, mode: bool = True) -> Wrapper:
        """Set the module to training mode, or (False) to evaluation."""
        if mode:
            self.module.train()
        else:
            self.module.eval()
        return self

    def eval(self) -> Wrapper:
        """Set the module to evaluation mode."""
        return self.train(False)

    @property
    def training(self) -> bool:
        """Whether the module is in training mode."""
        return self.module.training

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the module."""
        return self.module.state_dict()

    def load_module_state(self, state: Mapping[str, Any]) -> None:
        """Load a module's ``state_dict()`` into the wrapped module."""
        self.module.load_state_dict(read_all(state))


def no_attribute(wrapper: Any, members: Mapping[str, Any], name: str) -> str:
    """Return the text of the AttributeError for an attribute that a DDP lacks.

    It points to ``model.module`` if the wrapped module, ``members["module"]``, has the attribute.
    """
    text = f"{type(wrapper).__name__!r} object has no attribute {name!r}"
    if not name.startswith("_") and hasattr(members.get("module"), name):
        text += f", its module has: write model.module.{name}"
    return text

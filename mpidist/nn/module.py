"""Parameters, and modules that hold them: forward and an explicit backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ..errors import InvalidArgument


class Parameter:
    """An array to be learnt and the gradient of the loss with respect to it.

    Attributes
    ----------
    data : ndarray
        The values (numpy or cupy).  Changed in place, so that whoever holds them sees it.
    grad : ndarray or None
        The gradient, of the same shape; None until a backward has come by.
    hooks : tuple of callable
        Called without arguments after something was added to the gradient.
    """

    __slots__ = ("data", "grad", "hooks")

    def __init__(self, data: Any, grad: Any = None):
        self.data, self.grad = data, grad
        self.hooks: tuple[Callable[[], object], ...] = ()

    def accumulate(self, grad: Any) -> None:
        """Add `grad` to what is there."""
        if self.grad is None:
            self.grad = grad
        else:
            self.grad += grad
        for hook in self.hooks:
            hook()

    def __repr__(self) -> str:
        return f"Parameter(shape={self.data.shape}, dtype={self.data.dtype})"


class Module:
    """A piece of a model; parameters and modules assigned as attributes belong to it.

    A subclass defines ``forward(x)`` and ``backward(grad)``.  The latter gets the gradient of the
    loss with respect to the output of the last forward, adds the gradients of its parameters, and
    returns the one with respect to the input.

    Attributes
    ----------
    training : bool
        Whether it is being trained.
    saved : tuple of str or None
        The attributes that forward, or ``backward_input``, leaves for the way back.  A pipeline
        keeps them for each microbatch; None lets it find them, and one microbatch stays alive
        longer then.
    """

    training = True
    saved: tuple[str, ...] | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # What a class inherits describes the methods that it has replaced, not its own.
        if "forward" in cls.__dict__ and "saved" not in cls.__dict__:
            cls.saved = None
        if "backward" in cls.__dict__ and "backward_input" not in cls.__dict__:
            cls.backward_input = Module.backward_input  # type: ignore[method-assign]
            cls.backward_weight = Module.backward_weight  # type: ignore[method-assign]

    def forward(self, x: Any) -> Any:
        """Compute the output for a batch `x`."""
        raise NotImplementedError

    def backward(self, grad: Any) -> Any:
        """Go back through the last forward."""
        raise NotImplementedError

    def backward_input(self, grad: Any) -> Any:
        """Do the half of `backward` that gives the gradient of the input.

        A layer that can do the other half later defines both halves; here this one is the whole.
        """
        return self.backward(grad)

    def backward_weight(self) -> None:
        """Do the other half, after ``backward_input``: add the gradients of the parameters."""

    @property
    def splits(self) -> bool:
        """Whether anything is left to ``backward_weight``."""
        return type(self).backward_weight is not Module.backward_weight

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Call `forward`."""
        return self.forward(*inputs, **options)

    def children(self) -> Iterator[tuple[str, Module]]:
        """Give the modules directly inside, with their names."""
        return ((n, m) for n, m in vars(self).items() if isinstance(m, Module))

    def modules(self) -> list[Module]:
        """List this module and all modules inside it."""
        return [self, *(m for _, child in self.children() for m in child.modules())]

    def named_parameters(self) -> list[tuple[str, Parameter]]:
        """List the parameters with their names, each of them once even if it is shared."""
        own = [(n, p) for n, p in vars(self).items() if isinstance(p, Parameter)]
        for name, child in self.children():
            own += [(f"{name}.{inner}", p) for inner, p in child.named_parameters()]
        seen: set[int] = set()
        return [(n, p) for n, p in own if not (id(p) in seen or seen.add(id(p)))]  # type: ignore[func-returns-value]

    def parameters(self) -> list[Parameter]:
        """List the parameters in the order in which forward meets them."""
        return [p for _, p in self.named_parameters()]

    def train(self, mode: bool = True) -> Module:
        """Switch this module and those inside to training, or (False) to evaluation."""
        for module in self.modules():
            module.training = mode
        return self

    def eval(self) -> Module:
        """Switch to evaluation."""
        return self.train(False)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self.parameters():
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Give copies of all parameters by name."""
        return {name: p.data.copy() for name, p in self.named_parameters()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy `state` into the parameters, in place.

        Raises
        ------
        InvalidArgument
            If names or shapes are not those of this module.
        """
        own = dict(self.named_parameters())
        expected = {n: tuple(p.data.shape) for n, p in own.items()}
        given = {n: tuple(np.shape(value)) for n, value in state.items()}
        wrong = sorted(
            n for n in {**expected, **given} if expected.get(n, "none") != given.get(n, "none")
        )
        if wrong:
            what = "; ".join(f"{n}: {given.get(n, 'missing')}" for n in wrong)
            allowed = "; ".join(f"{n}: {expected.get(n, 'none of that name')}" for n in wrong)
            raise InvalidArgument(f"state has {what}, the module has {allowed}")
        for name, value in state.items():
            _fill(own[name].data, value)

    def to(self, xp: Any) -> Module:
        """Move parameters and gradients to another array module, ``cupy`` or ``numpy``."""
        convert = (lambda a: a.get() if hasattr(a, "get") else a) if xp is np else xp.asarray
        for p in self.parameters():
            p.data = convert(p.data)
            p.grad = None if p.grad is None else convert(p.grad)
        return self


def _fill(data: Any, value: Any) -> None:
    """Copy into an array; into one on a GPU from the host too."""
    if isinstance(data, np.ndarray) or hasattr(value, "get"):
        data[...] = value
    else:
        data.set(np.asarray(value, data.dtype))


class Identity(Module):
    """Gives back what it gets."""

    saved = ()

    def forward(self, x: Any) -> Any:
        """Give `x`."""
        return x

    def backward(self, grad: Any) -> Any:
        """Give `grad`."""
        return grad


class Sequential(Module):
    """Modules one after another; their names are ``"0"``, ``"1"``, …."""

    saved = ()

    def __init__(self, *layers: Module):
        self.layers = list(layers)

    def children(self) -> Iterator[tuple[str, Module]]:
        """Give the modules in order."""
        return ((str(i), layer) for i, layer in enumerate(self.layers))

    def forward(self, x: Any) -> Any:
        """Pass `x` through every module."""
        for layer in self.layers:
            x = layer(x)
        return x

    def backward(self, grad: Any) -> Any:
        """Pass `grad` back through every module."""
        for layer in reversed(self.layers):
            grad = layer.backward(grad)
        return grad

    def backward_input(self, grad: Any) -> Any:
        """Pass `grad` back through the first halves."""
        for layer in reversed(self.layers):
            grad = layer.backward_input(grad)
        return grad

    def backward_weight(self) -> None:
        """Do the second halves."""
        for layer in self.layers:
            layer.backward_weight()

    @property
    def splits(self) -> bool:
        """Whether any layer leaves something to ``backward_weight``."""
        return super().splits and any(layer.splits for layer in self.layers)

"""Parameters and modules with a forward and an explicit backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ..errors import InvalidArgument


class Parameter:
    """A trainable array and the gradient of the loss with respect to it.

    Attributes
    ----------
    data : ndarray
        The values (numpy or cupy), which are always changed in place.
    grad : ndarray or None
        The gradient, of the same shape; None until a backward has added to it.
    hooks : tuple of callable
        Functions without arguments, called after each addition to the gradient.
    """

    __slots__ = ("data", "grad", "hooks")

    def __init__(self, data: Any, grad: Any = None):
        self.data, self.grad = data, grad
        self.hooks: tuple[Callable[[], object], ...] = ()

    def accumulate(self, grad: Any) -> None:
        """Add `grad` to the gradient, and call the hooks; the first `grad` is kept, not copied."""
        if self.grad is None:
            self.grad = grad
        else:
            self.grad += grad
        for hook in self.hooks:
            hook()

    def __repr__(self) -> str:
        return f"Parameter(shape={self.data.shape}, dtype={self.data.dtype})"


class Module:
    """A part of a model; parameters and modules assigned as attributes belong to it.

    A subclass defines ``forward(x)`` and ``backward(grad)``.  ``backward`` gets the gradient of the
    loss with respect to the output of the last forward, adds the loss's gradient with respect to
    each parameter to the parameter's `grad`, and returns the gradient with respect to the input.

    Attributes
    ----------
    training : bool
        Whether the module is in training mode, not in evaluation.
    saved : tuple of str or None
        Names of the attributes in which forward, or ``backward_input``, saves activations for the
        backward.  A pipeline keeps these values for each microbatch.  None, the default of a class
        that defines forward, is an error in a pipeline: a layer that saves nothing declares ``()``.
    """

    training = True
    saved: tuple[str, ...] | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Inherited members describe the methods that this class replaces, not its own.
        if "forward" in cls.__dict__ and "saved" not in cls.__dict__:
            cls.saved = None
        if "backward" in cls.__dict__ and "backward_input" not in cls.__dict__:
            cls.backward_input = Module.backward_input  # type: ignore[method-assign]
            cls.backward_weight = Module.backward_weight  # type: ignore[method-assign]

    def forward(self, x: Any) -> Any:
        """Return the output for a batch `x`."""
        raise NotImplementedError

    def backward(self, grad: Any) -> Any:
        """Return the gradient of the last input, and add to the gradients of the parameters.

        `grad` is the gradient of the last output.
        """
        raise NotImplementedError

    def backward_input(self, grad: Any) -> Any:
        """Return the gradient of the last input: the first half of `backward`.

        A layer that can compute its parameters' gradients later defines this and
        ``backward_weight``; by default this is the whole of `backward`.
        """
        return self.backward(grad)

    def backward_weight(self) -> None:
        """Add to the parameters' gradients: the second half of `backward`, after the first.

        The first half is ``backward_input``.  By default this does nothing.
        """

    @property
    def splits(self) -> bool:
        """Whether `backward` can run in two halves: the class defines ``backward_weight``."""
        return type(self).backward_weight is not Module.backward_weight

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Return the output of `forward`."""
        return self.forward(*inputs, **options)

    def children(self) -> Iterator[tuple[str, Module]]:
        """Return an iterator over (name, submodule) of the direct submodules."""
        return ((n, m) for n, m in vars(self).items() if isinstance(m, Module))

    def modules(self) -> list[Module]:
        """Return this module and all submodules."""
        return [self, *(m for _, child in self.children() for m in child.modules())]

    def named_parameters(self) -> list[tuple[str, Parameter]]:
        """Return (name, parameter) of all parameters, each once even if modules share it.

        A module's own parameters come first, then those of its submodules, in the order of
        assignment; the names are as "layer.weight".
        """
        own = [(n, p) for n, p in vars(self).items() if isinstance(p, Parameter)]
        for name, child in self.children():
            own += [(f"{name}.{inner}", p) for inner, p in child.named_parameters()]
        seen: set[int] = set()
        return [(n, p) for n, p in own if not (id(p) in seen or seen.add(id(p)))]  # type: ignore[func-returns-value]

    def parameters(self) -> list[Parameter]:
        """Return all parameters, in the order of :meth:`named_parameters`."""
        return [p for _, p in self.named_parameters()]

    def train(self, mode: bool = True) -> Module:
        """Set this module and all submodules to training (or evaluation) mode; return this one."""
        for module in self.modules():
            module.training = mode
        return self

    def eval(self) -> Module:
        """Set this module and all submodules to evaluation mode; return this one."""
        return self.train(False)

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        for parameter in self.parameters():
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all parameters, by name."""
        return {name: p.data.copy() for name, p in self.named_parameters()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy `state` into the parameters, in place.

        Raises
        ------
        InvalidArgument
            If names or shapes differ from those of this module.
        """
        own = dict(self.named_parameters())
        expected = {n: tuple(p.data.shape) for n, p in own.items()}
        given = {n: tuple(np.shape(value)) for n, value in state.items()}
        wrong = sorted(
            n for n in {**expected, **given} if expected.get(n, "none") != given.get(n, "none")
        )
        if wrong:
            found = "; ".join(f"{n}: {given.get(n, 'missing')}" for n in wrong)
            allowed = "; ".join(f"{n}: {expected.get(n, 'none of that name')}" for n in wrong)
            raise InvalidArgument(f"state has {found}, the module has {allowed}")
        for name, value in state.items():
            _fill(own[name].data, value)

    def to(self, xp: Any) -> Module:
        """Convert parameters and gradients to arrays of `xp`, the module cupy or numpy.

        Returns this module.
        """
        convert = (lambda a: a.get() if hasattr(a, "get") else a) if xp is np else xp.asarray
        for p in self.parameters():
            p.data = convert(p.data)
            p.grad = None if p.grad is None else convert(p.grad)
        return self


def _fill(data: Any, value: Any) -> None:
    """Copy `value` into the array `data`, in place; it may be on a GPU only if `data` is, too."""
    if isinstance(data, np.ndarray) or hasattr(value, "get"):
        data[...] = value
    else:
        data.set(np.asarray(value, data.dtype))


class Identity(Module):
    """A module that returns its input."""

    saved = ()

    def forward(self, x: Any) -> Any:
        """Return the input `x`."""
        return x

    def backward(self, grad: Any) -> Any:
        """Return the gradient `grad`."""
        return grad


class Sequential(Module):
    """A chain of modules: each gets the output of the one before.  Names: ``"0"``, ``"1"``, …."""

    saved = ()

    def __init__(self, *layers: Module):
        self.layers = list(layers)

    def children(self) -> Iterator[tuple[str, Module]]:
        """Return an iterator over (name, module) of the modules, in order."""
        return ((str(i), layer) for i, layer in enumerate(self.layers))

    def forward(self, x: Any) -> Any:
        """Return the output of the last module."""
        for layer in self.layers:
            x = layer(x)
        return x

    def backward(self, grad: Any) -> Any:
        """Return the gradient of the first module's last input, by `backward` of all modules."""
        for layer in reversed(self.layers):
            grad = layer.backward(grad)
        return grad

    def backward_input(self, grad: Any) -> Any:
        """Return the gradient of the first module's last input, by all their `backward_input`."""
        for layer in reversed(self.layers):
            grad = layer.backward_input(grad)
        return grad

    def backward_weight(self) -> None:
        """Add to the gradients of all modules' parameters: the second half of `backward`."""
        for layer in self.layers:
            layer.backward_weight()

    @property
    def splits(self) -> bool:
        """Whether `backward` of any module of the chain can run in two halves."""
        return super().splits and any(layer.splits for layer in self.layers)

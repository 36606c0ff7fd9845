"""Backward in two halves: gradients of the inputs, then of the parameters; no node runs twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import torch

try:
    from torch.autograd.graph import GradientEdge, get_gradient_edge
except ImportError:  # PyTorch before 2.2
    GradientEdge = get_gradient_edge = None  # type: ignore[assignment,misc]

Node = Any

WHOLE = "CheckpointFunctionBackward"
"""The node of ``checkpoint(use_reentrant=True)``, whose backward computes all gradients."""


@cache
def can_halve() -> bool:
    """Return whether this PyTorch can begin a backward in the middle of a graph."""
    if GradientEdge is None:
        return False
    # Cached, so the first call may come from where gradients are turned off.
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(1, requires_grad=True)
        try:
            torch.autograd.backward([get_gradient_edge(x * 2)], [torch.ones(1)], inputs=[x])
        except (TypeError, AttributeError, RuntimeError):
            return False
        return x.grad is not None


@cache
def root_finder() -> Callable[[Any], Any]:
    """Return a function that maps a tensor to an object from which backward can begin later.

    That object, the root, is the tensor's GradientEdge, which lets the tensor's memory be freed.
    In a PyTorch whose edges do not keep the graph alive it is the tensor itself.
    """
    edges = can_halve() and "ownership_token" in GradientEdge._fields
    return get_gradient_edge if edges else _itself


def _itself(x: Any) -> Any:
    return x


def _edge(root: Any) -> Any:
    return get_gradient_edge(root) if isinstance(root, torch.Tensor) else root


class Halves:
    """Backward through one graph, in two halves.

    The first half runs only on the paths from outputs to inputs.  At each node of these paths that
    also leads to parameters it keeps the incoming gradients; the second half begins there::

        x ----> mul ----> tanh ----> mul ----> y       first half:   y to x along the line
                 |                    |
                w0                   w1                second half:  each mul to its parameter

    A parameter that several such nodes lead to is in the first half: gradients that arrive at one
    of these nodes could pass through another one, and be counted twice.

    `roots` are the outputs, as tensors or as :func:`root_finder` maps them, `grads` the gradient of
    each; `inputs` are leaves whose gradients the first half computes.
    """

    def __init__(self, roots: Sequence[Any], grads: Sequence[Any], inputs: Sequence[Any]):
        self._roots, self._grads, self._inputs = list(roots), list(grads), list(inputs)
        self._arrived: dict[Node, Sequence[Any]] = {}
        self._parameters: dict[Node, list[Any]] = {}
        self._early: list[Any] = []  # parameters in the first half
        self.divisible = True  # whether there are two halves; else inputs() runs all of backward
        if self._inputs and self._roots:
            starts = [_edge(root) for root in self._roots]
            order = _sorted(edge.node for edge in starts)
            self.divisible = not any(type(node).__name__ == WHOLE for node in order)
            if self.divisible:
                self._divide(starts, order)

    def _divide(self, starts: list[Any], order: list[Node]) -> None:
        """Find the border, the nodes where the second half begins; `order` has leaves first."""
        # In the picture of the class, from x to y (acc: the node that adds to a leaf's gradient)::
        #
        #     node        acc x   acc w0   mul         tanh   acc w1   mul
        #     reaching    yes     no       yes         yes    no       yes        leads to an input
        #     beyond      -       w0       w0          -      w1       w1         off the paths
        #     border                       yes                         yes        both
        ends = {get_gradient_edge(x).node for x in self._inputs}
        reaching: set[Node] = set(ends)
        beyond: dict[Node, dict[int, Any]] = {}
        for node in order:  # each after the nodes that it leads to
            following = [n for n, _ in node.next_functions if n is not None]
            if any(n in reaching for n in following):
                reaching.add(node)
            if node in ends:
                beyond[node] = {}
                continue
            leaf = getattr(node, "variable", None)
            found = {id(leaf): leaf} if leaf is not None else {}
            for n in following:
                if n not in reaching:
                    found.update(beyond[n])
            beyond[node] = found
        border = {n: list(beyond[n].values()) for n in order if n in reaching and beyond[n]}
        # An output that no input leads to: all of its backward is in the second half, from its own
        # gradient.
        for edge, grad in zip(starts, self._grads):
            if edge.node not in reaching and beyond[edge.node]:
                border.setdefault(edge.node, list(beyond[edge.node].values()))
                given = list(self._arrived.get(edge.node, ()))
                given += [None] * (edge.output_nr + 1 - len(given))
                before = given[edge.output_nr]  # an output may be given more than once
                given[edge.output_nr] = grad if before is None else before + grad
                self._arrived[edge.node] = given
        self._share(border)

    def _share(self, border: dict[Node, list[Any]]) -> None:
        """Assign each parameter to a half: to the second if exactly one border node leads to it.

        `border` maps each node at which the second half can begin to the parameters it leads to.
        """
        counts: dict[int, int] = {}
        for parameters in border.values():
            for p in parameters:
                counts[id(p)] = counts.get(id(p), 0) + 1
        early: dict[int, Any] = {}
        for node, parameters in border.items():
            own = [p for p in parameters if counts[id(p)] == 1]
            if own:
                self._parameters[node] = own
            early.update((id(p), p) for p in parameters if counts[id(p)] > 1)
        self._early = list(early.values())

    def inputs(self) -> None:
        """Run the first half: add to ``.grad`` of the inputs, and of this half's parameters."""
        if not self.divisible:
            torch.autograd.backward(self._roots, self._grads)
            self._roots, self._grads, self._inputs = [], [], []
            return
        targets = self._inputs + self._early
        if not targets or not self._roots:
            return
        hooks = [
            node.register_prehook(partial(self._note, node))
            for node in self._parameters
            if node not in self._arrived
        ]
        try:
            # Retained: the second half runs the nodes behind the border, and needs what they saved.
            torch.autograd.backward(self._roots, self._grads, retain_graph=True, inputs=targets)
        finally:
            for hook in hooks:
                hook.remove()
        if self._inputs:
            self._grads = []

    def _note(self, node: Node, grads: Sequence[Any]) -> None:
        self._arrived[node] = grads

    def weights(self) -> None:
        """Run the second half: add to ``.grad`` of the parameters that the first half left out."""
        if not self._inputs:
            if self._roots:
                torch.autograd.backward(self._roots, self._grads)
            return
        for node, parameters in self._parameters.items():
            arrived = enumerate(self._arrived.pop(node, ()))
            given = [(GradientEdge(node, k), grad) for k, grad in arrived if grad is not None]
            if given:
                edges, grads = zip(*given)
                torch.autograd.backward(list(edges), list(grads), inputs=parameters)


def _sorted(roots: Iterable[Node]) -> list[Node]:
    """Return the nodes of a graph sorted, each after the nodes of its ``next_functions``."""
    # With a stack of its own: a recursion as deep as the graph would exceed Python's limit.
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    push: Callable[[tuple[Node, bool]], None] = stack.append
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
            continue
        if node in seen:
            continue
        seen.add(node)
        push((node, True))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                push((following, False))
    return order

"""Stages of a module with a forward of its own, traced by torch.distributed.pipelining."""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import InvalidArgument, Unsupported

_LISTS = (nn.ModuleList, nn.Sequential)
Value = tuple[int, int]
"""A value between stages: the stage that computes it (-1: the input), and which one it is."""


class Wiring(NamedTuple):
    """The values that a stage receives, computes and passes on.

    A Value is a pair: the stage that computes it (-1 for an input of the model), and the index
    among the outputs of that stage.
    """

    receives: list[Value]  # what arrives: values that this or a later stage needs
    takes: list[int]  # arguments of the stage's graph, as indices into `receives`
    gives: list[Value]  # what the next stage receives; on the last stage, the output of the model


class TracedStage(nn.Module):
    """A stage of a traced module; parameters, buffers and their names are those of the module.

    `inputs` has names and shapes of the model's inputs, on the first stage (None for a number's
    shape); `training` is whether the module was traced in training mode.
    """

    def __init__(self, graph: Any, number: int, wiring: Wiring, inputs: Any, training: bool):
        super().__init__()
        own = self.__dict__
        own["_graph"] = graph  # no submodule: names begin as in the model
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            own[name] = graph.__dict__[name]
        self._number, self._wiring, self._inputs = number, wiring, inputs
        self.training = training

    def forward(self, *values: Any, **named: Any) -> Any:
        """Return what the next stage receives, or on the last one the output of the model.

        `values` are what the stage before has returned, or on the first one the model's inputs,
        which may also be given by name (`named`).  Several values are returned as a tuple.
        """
        if self._number == 0:
            values = self._bound(values, named)
        wiring = self._wiring
        made = self._graph(*[values[place] for place in wiring.takes])
        outputs = made if isinstance(made, (tuple, list)) else (made,)
        every = dict(zip(wiring.receives, values))
        every.update(((self._number, k), output) for k, output in enumerate(outputs))
        given = tuple([every[value] for value in wiring.gives])
        return given if len(given) != 1 else given[0]

    def _bound(self, values: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """Return the model's inputs in order, given by position (`values`) and name (`named`).

        Raise InvalidArgument unless they have the names and shapes of the traced example.
        """
        names = [name for name, _ in self._inputs]
        given = values + tuple([named[name] for name in names[len(values) :] if name in named])
        if len(given) != len(names) or len(values) + len(named) != len(names):
            raise InvalidArgument(
                f"stage 0 of a traced model got {len(values)} arguments and {sorted(named)}: "
                f"expected the inputs of example: {', '.join(names)}"
            )
        for (name, shape), value in zip(self._inputs, given):
            found = tuple(value.shape) if isinstance(value, torch.Tensor) else None
            if found != shape:
                raise InvalidArgument(
                    f"stage 0 of a traced model: {name} of a microbatch has shape {found}: "
                    f"expected {shape}, as in example= of partition()"
                )
        return given

    def train(self, mode: bool = True) -> TracedStage:
        """Return this stage, which keeps the mode (training or evaluation) of the traced model.

        Raise InvalidArgument if `mode` is the other one.
        """
        if mode != self.training:
            modes = ("evaluation", "training")
            raise InvalidArgument(
                f"stage {self._number} was traced in {modes[self.training]} mode, for which its "
                f"layers are fixed: for {modes[mode]} set the model's mode and call partition() "
                "again; the stages share its parameters"
            )
        return self


def _units(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield (name, module, inside) for each part of a module, in order.

    Parts are the items of each ModuleList and Sequential, for which `inside` is true, and the
    submodules without such lists.
    """
    for name, child in module.named_children():
        if isinstance(child, _LISTS):
            for k, item in child.named_children():
                yield f"{prefix}{name}.{k}", item, True
        elif any(isinstance(part, _LISTS) for part in child.modules()):
            yield from _units(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child, False


def parts_of(model: nn.Module, calls: Sequence[str] | None = None) -> list[tuple[str, float]]:
    """Return where a model can be cut, in order: (name of a submodule, number of elements) pairs.

    The model begins with the first one; the others are the items of its ModuleLists and
    Sequentials, or without such lists its children.  The number is that of the parameters' elements
    up to the next submodule.  The order is that of definition; with `calls`, names of submodules,
    it is theirs, and submodules that are not in it are left out.
    """
    units = {name: (module, inside) for name, module, inside in _units(model)}
    if calls is not None:
        units = {name: units[name] for name in calls if name in units}
    lists = any(inside for _, inside in units.values())
    parts: list[tuple[str, float]] = []
    seen: set[int] = set()
    for name, (module, inside) in units.items():
        count = 0.0
        for p in module.parameters():
            count += p.numel() if id(p) not in seen else 0
            seen.add(id(p))
        if parts and not inside and lists:
            parts[-1] = (parts[-1][0], parts[-1][1] + count)
        else:
            parts.append((name, count))
    return parts


def check_split(model: nn.Module, split: Any, stages: int, where: str) -> list[str]:
    """Return `split` as a list: the names of the submodules at which stages 1, 2, … begin.

    Raise InvalidArgument unless these are ``stages - 1`` names of submodules.  `where`, such as
    "rank 0: ", begins error messages.
    """
    names = [name for name, _ in model.named_modules() if name]
    if isinstance(split, str) or not isinstance(split, Sequence) or len(split) != stages - 1:
        raise InvalidArgument(
            f"{where}split={split!r}: expected a list of {stages - 1} names, the submodules at "
            f"which stages 1 … {stages - 1} begin"
        )
    for name in split:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=3, cutoff=0.0)
            raise InvalidArgument(
                f"{where}split={list(split)!r}: {type(model).__name__} has no submodule {name!r}; "
                f"similar are {', '.join(map(repr, near))}"
            )
    return list(split)


def cut(
    model: nn.Module,
    choose: Callable[[list[tuple[str, float]]], list[str]],
    example: Any,
    where: str,
) -> tuple[list[TracedStage], list[str]]:
    """Trace a model and cut it before the first calls of submodules; return stages and their names.

    ``choose(parts)`` returns the names of the submodules at which stages begin, but the first, from
    what :func:`parts_of` returns for the calls of the model's forward.  `example` is a microbatch:
    the argument of the model, its arguments (tuple), or keyword arguments (dict).  The stages have
    the model's parameters and buffers.  Unsupported if PyTorch cannot trace the model, or forward
    does not first call the chosen submodules in the order of their names.
    """
    from torch.distributed.pipelining import pipeline

    named = example if type(example) is dict else {}
    values = () if named else example if type(example) is tuple else (example,)
    split: list[str] = []

    def policy(traced: Any) -> Any:
        _inline_no_grad(traced)
        calls = _first_calls(traced.graph)
        split.extend(choose(parts_of(model, list(calls))))
        if split != [name for name in calls if name in split]:
            called = [name for name in calls if name in split]
            raise Unsupported(
                f"{where}split={split!r}: the forward of {type(model).__name__} first calls of "
                f"these {called}: expected submodules that it calls, in this order"
            )
        for name in split:
            with traced.graph.inserting_before(calls[name]):
                traced.graph.call_function(torch.ops.pippy._pipe_split.default)
        return traced

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pipe = pipeline(model, values, named, split_policy=policy)
    except (InvalidArgument, Unsupported):
        raise
    except Exception as error:  # whatever the model's forward raises
        reason = error.__cause__ or error
        text = (str(reason).strip() or type(reason).__name__).splitlines()[0]
        raise Unsupported(
            f"{where}{type(model).__name__} cannot be traced by torch.export: "
            f"{type(reason).__name__}: {text}; write its stages as modules of your own"
        ) from error
    stages = len(split) + 1
    if pipe.num_stages != stages:
        raise Unsupported(
            f"{where}split={split!r} gives {pipe.num_stages} stages of {type(model).__name__}, not "
            f"{stages}: expected a stage to compute something before each of these submodules"
        )
    inputs, wirings = _wire(pipe.split_gm.graph, stages, where)
    shapes = [*values, *named.values()]
    if len(shapes) != len(inputs):
        raise Unsupported(
            f"{where}the traced model has inputs {inputs}, example= has {len(shapes)}: expected "
            "a tensor, or a tuple or dict of tensors and numbers"
        )
    forms = [
        (name, tuple(x.shape) if isinstance(x, torch.Tensor) else None)
        for name, x in zip([*inputs[: len(values)], *named], shapes)
    ]
    graphs = [pipe.get_stage_module(k) for k in range(stages)]
    _share(graphs, model)
    return [
        TracedStage(graph, k, wiring, forms if k == 0 else (), model.training)
        for k, (graph, wiring) in enumerate(zip(graphs, wirings))
    ], split


def _inline_no_grad(traced: Any) -> None:
    """Replace the functions into which tracing puts what is computed within no_grad().

    PyTorch cannot cut a graph that calls them.  Of detached arguments no graph is recorded either.
    """
    graph, region = traced.graph, torch.ops.higher_order.wrap_with_set_grad_enabled
    for node in graph.find_nodes(op="call_function", target=region):
        enabled, function, *given = node.args
        if enabled:
            continue
        inner = traced.get_submodule(function.target).graph
        with graph.inserting_before(node):
            detached = [graph.call_function(torch.ops.aten.detach.default, (x,)) for x in given]
            for x in detached:
                x.meta.update(node.meta)
            values = dict(zip(inner.find_nodes(op="placeholder"), detached))
            made = graph.graph_copy(inner, values)
        for item in list(node.users):
            item.replace_all_uses_with(made[item.args[1]])
            graph.erase_node(item)
        graph.erase_node(node)
        if not function.users:
            graph.erase_node(function)


def _first_calls(graph: Any) -> dict[str, Any]:
    """Return the first node of each submodule that a traced forward calls, by name, in order."""
    calls: dict[str, Any] = {}
    for node in graph.nodes:
        for name, _ in node.meta.get("nn_module_stack", {}).values():
            calls.setdefault(name, node)
    return calls


def _share(graphs: Sequence[nn.Module], model: nn.Module) -> None:
    """Put the model's own parameters and buffers into its traced parts, under all their names.

    Tracing copies tied ones, keeps one of their names, and makes all buffers persistent.  What no
    stage uses comes into the last one.
    """
    kinds = ("_parameters", "_buffers")
    owners = dict(model.named_modules(remove_duplicate=False))
    held: set[str] = set()
    for graph in graphs:
        _join_calls(graph, kinds)
        for prefix, part in graph.named_modules():
            for kind in kinds:
                own, here = getattr(owners.get(prefix), kind, {}), getattr(part, kind)
                here.update((name, own[name]) for name in here if own.get(name) is not None)
                held.update(f"{prefix}.{name}" for name in here)
    ids = [{id(x) for x in (*graph.parameters(), *graph.buffers())} for graph in graphs]
    for prefix, owner in owners.items():
        for kind in kinds:
            for name, x in getattr(owner, kind).items():
                if x is not None and f"{prefix}.{name}" not in held:
                    users = [graph for graph, has in zip(graphs, ids) if id(x) in has]
                    for graph in users or graphs[-1:]:
                        getattr(_part(graph, prefix), kind)[name] = x
    for graph in graphs:
        for prefix, part in graph.named_modules():
            own = getattr(owners.get(prefix), "_buffers", {})
            fleeting = getattr(owners.get(prefix), "_non_persistent_buffers_set", ())
            part._non_persistent_buffers_set.update(
                name for name in part._buffers if name not in own or name in fleeting
            )


def _join_calls(graph: nn.Module, kinds: tuple[str, ...]) -> None:
    """Give the parts of a traced part that are the same submodule, called again, one state.

    Tracing names them ``block``, ``block@1``, …: they get the parameters and buffers of ``block``,
    and only this one is a submodule, so that names are those of the model.
    """
    for prefix, part in list(graph.named_modules()):
        if "@" not in prefix:
            continue
        first = _part(graph, re.sub(r"@\d+", "", prefix))
        for kind in kinds:
            shared = getattr(first, kind)
            shared.update(getattr(part, kind))
            part.__dict__[kind] = shared
        above, _, name = prefix.rpartition(".")
        if "@" in name:
            caller = graph.get_submodule(above)
            caller.__dict__[name] = caller._modules.pop(name)


def _part(module: nn.Module, name: str) -> nn.Module:
    """Return the submodule of a name, made where there is none."""
    for atom in name.split(".") if name else ():
        if atom not in module._modules:
            module.add_module(atom, nn.Module())
        module = module._modules[atom]  # type: ignore[assignment]
    return module


def _wire(graph: Any, stages: int, where: str) -> tuple[list[str], list[Wiring]]:
    """Return the names of a traced model's inputs, and the wiring of its stages.

    `where`, such as "rank 0: ", begins the error message if the graph computes between stages.
    """
    # y = c(a(x), b(a(x))) with a stage each for a, b and c.  A stage sends to the next one only, so
    # a value passes through all stages up to the last that needs it::
    #
    #     stage   receives          computes   gives
    #     0       (-1, 0)           (0, 0)     (0, 0)
    #     1       (0, 0)            (1, 0)     (0, 0)  (1, 0)
    #     2       (0, 0)  (1, 0)    (2, 0)     (2, 0)
    inputs: list[str] = []
    values: dict[Any, Value] = {}
    needed: list[list[Value]] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = (-1, len(inputs))
            inputs.append(node.name)
        elif node.op == "call_module":
            values[node] = (len(needed), 0)
            needed.append([values[each] for each in node.args])
        elif node.op == "call_function" and len(node.args) == 2 and node.args[0] in values:
            # getitem: one of several outputs of a stage
            values[node] = (values[node.args[0]][0], node.args[1])
        elif node.op == "output":
            returned: list[Any] = []  # a value may be there twice
            torch.fx.map_arg(node.args, returned.append)
            needed.append([values[each] for each in returned])
        else:
            raise Unsupported(
                f"{where}the traced model computes {node.format_node()} between its stages: "
                "expected all of it within stages"
            )
    receives = [[(-1, k) for k in range(len(inputs))]]
    for k in range(1, stages):
        later = {value for some in needed[k:] for value in some if value[0] < k}
        receives.append(sorted(later))
    gives = [*receives[1:], needed[stages]]
    return inputs, [
        Wiring(receives[k], [receives[k].index(value) for value in needed[k]], gives[k])
        for k in range(stages)
    ]

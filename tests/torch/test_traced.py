"""Stages of modules with a forward of their own: cut points, shared parameters, what is refused."""

import pytest

from mpidist import partition
from mpidist.errors import InvalidArgument, Unsupported
from tests.support.training_kits import NEEDS_TORCH, torch

if torch is None:
    pytest.skip(NEEDS_TORCH, allow_module_level=True)

from mpidist.torch.traced import parts_of
from tests.support.traced_models import make


@pytest.fixture(scope="module")
def whole():
    model, ids, mask, _ = make()
    example = (ids[:3], mask[:3])
    return model, example, partition(model, 3, example=example, verbose=False)


def test_stages_compute_what_the_model_does(whole):
    model, example, parts = whole
    value = example
    for stage in parts:
        value = stage(*value)
    torch.testing.assert_close(value, model(*example))


def test_stages_have_the_parameters_and_names_of_the_model(whole):
    model, _, parts = whole
    own, stages = (
        dict(model.named_parameters(remove_duplicate=False)),
        [dict(s.named_parameters()) for s in parts],
    )
    assert all(own[name] is p for stage in stages for name, p in stage.items())
    assert set().union(*[stage.state_dict() for stage in parts]) == set(model.state_dict())
    assert parts.tied == {"words.weight": (0, 2)}
    assert parts.split == ["blocks.0", "blocks.2"] and "before blocks.0" in str(parts)


def test_the_model_is_as_before(whole):
    model, example, parts = whole
    assert all("forward" not in vars(module) for module in model.modules())
    head = model.get_submodule("head")
    own = head.forward = head.forward  # an attribute of this module, as some libraries set it
    assert partition(model, 2, example=example, split=["head"], verbose=False)[0].training
    assert vars(head).pop("forward") is own and "_orig_forward" not in vars(head)


def test_parts_of_a_model():
    model = make()[0]
    parts = parts_of(model)
    assert [name for name, _ in parts] == ["words", *[f"blocks.{k}" for k in range(4)]]
    assert sum(cost for _, cost in parts) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({}, "Model: expected a Sequential, or example="),
        ({"split": ["block.1"]}, "no submodule 'block.1'; similar are 'blocks.1'"),
        ({"split": "blocks.1"}, "expected a list of 1 names"),
        ({"split": ["blocks.1", "blocks.2"]}, "expected a list of 1 names"),
        ({"by": "time"}, "by='time' is for a Sequential"),
        ({"stages": 9}, "expected 2 … 5, the number of submodules"),
    ],
)
def test_wrong_arguments(whole, arguments, said):
    model, example, _ = whole
    given = {"stages": 2, "example": example if arguments else None, **arguments}
    with pytest.raises(InvalidArgument, match=said):
        partition(model, **given)


def test_split_of_another_model():
    with pytest.raises(InvalidArgument, match="split=.* is for a module of PyTorch"):
        partition([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)], 2, split=["1"])


def test_another_shape_and_mode(whole):
    _, (ids, mask), parts = whole
    with pytest.raises(InvalidArgument, match=r"ids .* has shape \(2, 6\): expected \(3, 6\)"):
        parts[0](ids[:2], mask[:2])
    with pytest.raises(InvalidArgument, match="expected the inputs of example: ids, mask"):
        parts[0](ids)
    with pytest.raises(InvalidArgument, match="stage 1 was traced in training mode"):
        parts[1].eval()
    assert parts[1].train() is parts[1]


class Choosing(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    def forward(self, x):
        return self.b(x) if self.a(x).sum() > 0 else x


def test_a_model_that_cannot_be_traced():
    with pytest.raises(Unsupported, match="Choosing cannot be traced by torch.export: Guard") as e:
        partition(Choosing(), 2, example=torch.ones(2, 2), verbose=False)
    assert "\n" not in str(e.value)


class Repeated(torch.nn.Module):
    """Lists defined in another order than called, one layer called twice, and an unused layer.

    A parameter and a buffer under two names, and a buffer that is not saved.
    """

    def __init__(self):
        super().__init__()
        self.up = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(2)])
        self.unused = torch.nn.Linear(4, 2)
        self.bias = self.up[0].bias
        self.register_buffer("one", torch.full((4,), 2.0))
        self.register_buffer("two", self.one)
        self.register_buffer("scale", torch.full((4,), 3.0), persistent=False)

    def forward(self, x):
        for block in (*self.blocks, self.blocks[0]):
            x = torch.tanh(block(x)) * self.scale + self.two
        return self.up[0](x * torch.tensor([1.0, 2.0, 3.0, 4.0]))


class WithoutGradients(torch.nn.Module):
    """Its first two layers, a cut between them, are computed within no_grad()."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x):
        with torch.no_grad():
            y = self.blocks[1](torch.tanh(self.blocks[0](x)))
            z = y.exp()
        return self.blocks[3](torch.tanh(self.blocks[2](x * y))) + z


class Outputs(torch.nn.Module):
    """It returns a value twice, its input, and what is no tensor."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x, scale, also=True):
        y = self.blocks[1](self.blocks[0](x)) * scale
        last = self.blocks[2](y) + (1 if also else 0)
        return {"last": last, "each": (y, last), "input": x, "count": 3, "none": None}


X = torch.linspace(-1, 1, 8).view(2, 4)
CASES = {
    "repeated": (Repeated, (X,), ["blocks.1", "up.0"]),
    "without gradients": (WithoutGradients, (X,), ["blocks.1", "blocks.2"]),
    "outputs": (Outputs, {"also": False, "scale": X.flip(1), "x": X}, ["blocks.1", "blocks.2"]),
}


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if type(value) is tuple else ()
    return [x for each in inside for x in tensors_in(each)]


@pytest.mark.parametrize("case", CASES)
def test_forms_of_models(case):
    """Values, gradients and names of parameters and buffers are those of the model."""
    kind, example, split = CASES[case]
    torch.manual_seed(0)
    model = kind()
    named = example if isinstance(example, dict) else {}
    wanted = tensors_in(model(*(() if named else example), **named))
    sum(x.square().sum() for x in wanted).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    parts = partition(model, 3, example=example, verbose=False)
    assert parts.split == split
    value = parts[0](*(() if named else example), **named)
    for stage in parts[1:]:
        value = stage(*(value if type(value) is tuple else (value,)))
    found = tensors_in(value)
    torch.testing.assert_close(found, wanted)
    sum(x.square().sum() for x in found).backward()
    torch.testing.assert_close({n: p.grad for n, p in model.named_parameters()}, gradients)
    assert set().union(*[stage.state_dict() for stage in parts]) == set(model.state_dict())
    own = model.state_dict(keep_vars=True)
    for stage in parts:
        assert all(own[name] is x for name, x in stage.state_dict(keep_vars=True).items())


def test_a_layer_called_in_two_stages_is_tied():
    parts = partition(Repeated(), 3, example=X, verbose=False)
    assert parts.tied == {"blocks.0.weight": (0, 1), "blocks.0.bias": (0, 1)}


@pytest.mark.parametrize("split", [["up.0", "blocks.1"], ["blocks.1", "unused"]])
def test_split_in_another_order_than_called(split):
    with pytest.raises(Unsupported, match=r"Repeated first calls of these \['blocks.1'"):
        partition(Repeated(), 3, example=X, split=split)

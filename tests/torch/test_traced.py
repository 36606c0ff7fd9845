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

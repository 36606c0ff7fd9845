"""Objects of a State: every kind of them is restored from what was kept."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

import mpidist as md
from mpidist import nn
from mpidist.recovery.kept import GENERATOR, MODEL, SMALL, Kept, buffers_of, without_owner


@pytest.mark.parametrize(
    "value, kind",
    [
        (np.zeros(2), MODEL),
        (nn.Linear(2, 2), MODEL),
        (nn.SGD(nn.Linear(2, 2).parameters(), 0.1), MODEL),
        (np.random.default_rng(0), GENERATOR),
        (random.Random(0), GENERATOR),
        (np.random, GENERATOR),
        (SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None), SMALL),
    ],
)
def test_kind_of_an_object(value, kind):
    assert Kept.of("x", value, False).kind == kind


@pytest.mark.parametrize("make", [np.random.default_rng, random.Random])
def test_generator_goes_on_where_it_was(make):
    kept, other = Kept.of("rng", make(1), False), Kept.of("rng", make(2), False)
    kept.value.random()
    other.load(kept.state())
    assert other.value.random() == kept.value.random()


def test_generator_of_pytorch_goes_on_where_it_was():
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    kept, other = (Kept.of("rng", torch.Generator().manual_seed(n), False) for n in (1, 2))
    torch.rand(1, generator=kept.value)
    other.load(kept.state())
    again = [torch.rand(1, generator=one.value).item() for one in (kept, other)]
    assert again[0] == again[1]


def test_tensor_that_cannot_be_set_is_refused():
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    with pytest.raises(md.InvalidArgument, match="u cannot be restored: .*clone"):
        Kept.of("u", torch.ones(1).expand(3), False)
    assert Kept.of("u", torch.tensor(1.0, requires_grad=True), False).kind == MODEL


def test_array_is_restored_in_place():
    array = np.arange(4.0)
    kept = Kept.of("x", array, False)
    kept.load(np.full(4, 7.0))
    assert (array == 7).all()
    with pytest.raises(
        md.InvalidArgument, match=r"x has shape \(4,\), and that of the last commit"
    ):
        kept.load(np.zeros(3))


def test_optimizer_gets_its_rates_back():
    net = nn.Linear(2, 2)
    kept = Kept.of("optimizer", nn.Adam(net.parameters(), 0.1), False)
    saved = kept.state()
    kept.value.learning_rate = 3.0
    kept.load(saved)
    assert kept.value.learning_rate == 0.1
    for p in net.parameters():
        p.grad = np.ones_like(p.data)
    Kept.of("net", net, False).forget_gradients()
    assert all(p.grad is None for p in net.parameters())


def test_buffers_of_a_model_come_back():
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    kept = Kept.of("net", torch.nn.BatchNorm1d(3), False)
    assert buffers_of([Kept.of("x", np.zeros(2), False)]) == {}
    before = buffers_of([kept])["net"]
    kept.save_buffers()
    for saved in (kept.buffers, before):
        kept.value(torch.randn(4, 3))
        assert kept.value.num_batches_tracked == 1
        kept.set_buffers(saved)
        assert kept.value.num_batches_tracked == 0 and not kept.value.running_mean.any()


@pytest.mark.parametrize("value", [np.zeros(2), np.random.default_rng(0)])
def test_only_what_no_other_rank_has_needs_a_copy(value):
    assert not Kept.of("x", value, False).needs_copy
    assert Kept.of("x", value, True).needs_copy == isinstance(value, np.ndarray)


def kept(**objects):
    return [Kept.of(name, value, False) for name, value in objects.items()]


def test_optimizer_of_parameters_that_no_object_has_is_found():
    net, other = nn.Linear(2, 2), nn.Linear(2, 2)
    adam, rng = nn.Adam(net.parameters(), 0.1), np.random.default_rng(0)
    assert without_owner(kept(net=net, adam=adam, rng=rng)) == ""
    assert without_owner(kept(net=other, adam=adam, rng=rng)) == "adam"
    own = SimpleNamespace(state_dict=lambda: {"w": np.ones(2)}, load_state_dict=id)
    assert without_owner(kept(adam=adam, own=own)) == ""  # it may have them
    own.state_dict = lambda: {"w": 1}
    assert without_owner(kept(adam=adam, own=own)) == "adam"


def test_optimizer_of_pytorch_of_parameters_that_no_object_has_is_found():
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    net, u = torch.nn.Linear(2, 2), torch.zeros(3, requires_grad=True)
    net.bias.requires_grad = False
    sgd = torch.optim.SGD([{"params": net.parameters()}, {"params": [u]}], 0.1)
    rates = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)
    assert without_owner(kept(net=torch.compile(net), u=u, sgd=sgd, rates=rates)) == ""
    assert without_owner(kept(net=net, sgd=sgd, rates=rates)) == "sgd"
    assert without_owner(kept(weight=net.weight, u=u, sgd=sgd)) == ""
    scaler = torch.amp.GradScaler("cpu")
    assert without_owner(kept(u=u, sgd=sgd, scaler=scaler)) == "sgd"


def test_parameters_that_are_parts_of_other_objects():
    """Views of a flat array, a buffer that is trained, and what another library's optimizer has."""
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    flat = torch.zeros(10)
    net = torch.nn.Linear(2, 3)
    net.weight = torch.nn.Parameter(flat[:6].view(3, 2))
    net.bias = torch.nn.Parameter(flat[6:9])
    sgd = torch.optim.SGD(net.parameters(), 0.1)
    assert without_owner(kept(flat=flat, sgd=sgd)) == ""
    net.register_buffer("prompt", torch.zeros(4, requires_grad=True))
    sgd = torch.optim.SGD([*net.parameters(), net.prompt], 0.1)
    assert without_owner(kept(net=net, sgd=sgd)) == ""
    assert without_owner(kept(flat=flat, sgd=sgd)) == "sgd"

    class Foreign(torch.optim.SGD):
        pass

    assert without_owner(kept(foreign=Foreign(net.parameters(), 0.1))) == ""
    layer, array = nn.Linear(2, 2), np.zeros(6)
    layer.weight.data, layer.bias.data = array[:4].reshape(2, 2), array[4:]
    assert without_owner(kept(array=array, adam=nn.Adam(layer.parameters()))) == ""

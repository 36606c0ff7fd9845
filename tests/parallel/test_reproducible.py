"""The same weights on any number of ranks: the tree over microbatches, and DDP by it."""

import itertools
import logging

import numpy as np
import pytest

from mpidist.communicator.simulation import run_simulated
from mpidist.errors import InvalidArgument, Unsupported
from mpidist.frameworks.base import framework_of
from mpidist.nn import Module, Parameter
from mpidist.parallel import DDP, ZeroOptimizer, hooks
from mpidist.parallel.reproducible import add, tree
from tests.support.training_kits import KITS, SMALL, SMALLEST, Weights, batch, needs_torch, torch

NUMBERS = itertools.count(1)  # of simulated ranks, which are threads: another one in each call


def summed(terms):
    """The sum that is wanted: of halves, or at the largest power of two if the length is odd."""
    count = len(terms)
    if count == 1:
        return terms[0].copy()
    left = count // 2 if count % 2 == 0 else 1 << (count - 1).bit_length() - 1
    return summed(terms[:left]) + summed(terms[left:])


@pytest.mark.parametrize("total", [1, 2, 3, 5, 6, 7, 8, 12, 13, 24, 30, 60])
def test_summed_by_any_number_of_ranks_is_the_tree(total):
    terms = np.random.default_rng(total).normal(size=(total, 50)).astype(np.float32)
    for ranks in (n for n in range(1, total + 1) if total % n == 0):
        every, each = [], total // ranks
        for rank in range(ranks):
            mine = []
            for number in range(rank * each, (rank + 1) * each):
                add(tree(0, total), mine, number, 1, terms[number].copy())
            assert len(mine) <= 2 * each.bit_length()
            every += mine
        joined = []
        for first, count, total_of in every:
            add(tree(0, total), joined, first, count, total_of)
        ((_, _, found),) = joined
        assert found.tobytes() == summed(terms).tobytes(), ranks


def alone(kit, total, steps):
    """Weights, and gradients of the last step, of the same training without any communicator."""
    net = kit.mlp()
    make, options = kit.optimizers()["momentum"]
    optimizer = make(net.parameters(), **options)
    for step in range(steps):
        found = []
        for number in range(total):
            x, labels = batch(100 * step + number, 4)
            optimizer.zero_grad()
            kit.step(net, x, labels, 0.25)
            found.append([g.copy() for g in kit.gradients(net)])
        for k, gradient in enumerate(kit.gradients(net)):
            gradient[...] = summed([each[k] for each in found]) / total
        optimizer.step()
    return [v.tobytes() for v in kit.values(net)]


@pytest.mark.parametrize("overlap", ["none", "polls", "auto"])
@pytest.mark.parametrize("each", [1, 2, 3, 5, 6, 7])
@pytest.mark.parametrize("kit", KITS)
def test_weights_are_those_of_one_process(comm, kit, each, overlap):
    """One, two and more subtrees a rank; several buckets, also changed after the first step."""
    total, net = each * comm.size, kit.mlp()
    model = DDP(net, comm, reproducible=total, overlap=overlap, **SMALL)
    make, options = kit.optimizers()["momentum"]
    optimizer = make(net.parameters(), **options)
    for step in range(4):
        optimizer.zero_grad()
        for k in range(each):
            assert model.microbatch == comm.rank * each + k
            x, labels = batch(100 * step + model.microbatch, 4)
            kit.step(model, x, labels, 0.25)
        model.sync_gradients()
        optimizer.step()
    assert [v.tobytes() for v in kit.values(net)] == alone(kit, total, 4)
    model.close()


class Planned(Module):
    """Its backward makes the additions of a plan: for each microbatch (parameter, value) pairs."""

    def __init__(self, plans):
        self.plans, self.parts = plans, [Parameter(np.zeros(5, np.float32)) for _ in range(4)]

    def named_parameters(self):
        return [(f"p{k}", p) for k, p in enumerate(self.parts)]

    def forward(self, number):
        self.number = number
        return number

    def backward(self, grad):
        for k, value in self.plans[self.number]:
            self.parts[k].accumulate(value.copy())
        return grad

    def wanted(self, k):
        """The bits of the mean for parameter `k`: each microbatch begins at zero."""
        sums = []
        for plan in self.plans:
            total = np.zeros(5, np.float32)
            for index, value in plan:
                if index == k:
                    total += value
            sums.append(total)
        return (summed(sums) / np.float32(len(self.plans))).tobytes()


def random_plans(kind, total):
    """Additions of values whose sums depend on their order; the last parameter is never used."""
    random = np.random.default_rng(total)
    plans = []
    for number in range(total):
        used = {
            "once": [0, 1, 2],
            "twice": [0, 1, 2, 1],
            "twice each other one": [0, 1, 2, *([1, 1] if number % 2 == 0 else [])],
            "unused in some": [k for k in range(3) if (number + 1) % (k + 2)] or [0],
            "negative zeros": [0, 1, 2],
        }[kind]
        values = random.normal(size=(len(used), 5)) * 10.0 ** random.integers(-4, 4)
        plans.append([(k, v.astype(np.float32)) for k, v in zip(used, values, strict=True)])
        if kind == "negative zeros":
            for _, value in plans[-1]:
                value[:3] = -0.0
    return plans


@pytest.mark.parametrize(
    "kind", ["once", "twice", "twice each other one", "unused in some", "negative zeros"]
)
@pytest.mark.parametrize("total", [12, 7, 15, 16, 20])
@pytest.mark.parametrize("overlap", ["none", "polls"])
def test_bits_do_not_depend_on_how_often_a_pass_adds(comm, kind, total, overlap):
    """A sum onto which a pass adds must not have the two additions of a layer that is shared."""
    total = total if total % comm.size == 0 else total * comm.size
    each, plans = total // comm.size, random_plans(kind, total)
    if kind == "twice each other one" and each % 2 and comm.size > 1:
        each = 2 * each  # else some rank sees the second addition after its first pass: below
        total, plans = each * comm.size, random_plans(kind, each * comm.size)
    if kind == "twice each other one" and overlap == "polls":
        overlap = "none"  # else refused: in the last pass of a step as in that of the first one
    net = Planned(plans)
    model = DDP(net, comm, reproducible=total, overlap=overlap, unused="zero", **SMALLEST)
    for _ in range(3):
        net.zero_grad()
        for _ in range(each):
            model(model.microbatch)
            model.backward(None)
        for k, p in enumerate(net.parts):
            assert p.grad.tobytes() == net.wanted(k), k
    model.close()


@pytest.mark.parametrize("kind", ["once", "twice", "unused in some", "negative zeros"])
@pytest.mark.parametrize("total", [12, 24, 60])
def test_bits_are_equal_on_every_number_of_ranks(total, kind):
    """Ranks that have one subtree and several, of equal and of different numbers."""
    plans = random_plans(kind, total)

    def train(comm):
        net = Planned(plans)
        model = DDP(net, comm, reproducible=total, unused="zero", **SMALLEST)
        for _ in range(2):
            net.zero_grad()
            for _ in range(total // comm.size):
                model(model.microbatch)
                model.backward(None)
        return [p.grad.tobytes() for p in net.parts]

    wanted = [Planned(plans).wanted(k) for k in range(4)]
    for ranks in (1, 2, 3, 4, 6, 12):
        assert run_simulated(ranks, train) == [wanted] * ranks, ranks


def joined(comm, each):
    """How many microbatches a rank has before the first one that is added to a sum."""
    first = comm.rank * each
    splits = tree(0, each * comm.size).items()
    right = {start + left for (start, n), left in splits if n - left == 1 and start >= first}
    return min(n - first for n in right if first < n < first + each)


def test_second_addition_that_comes_late_is_named(comm):
    """The sum of the microbatches before is in the gradient by then; the next try keeps apart."""
    each = 6
    plans, late = random_plans("once", each * comm.size), joined(comm, each)
    for place in comm.allgather_object(comm.rank * each + late):
        plans[place].append(plans[place][0])
    net = Planned(plans)
    model = DDP(net, comm, reproducible=each * comm.size, unused="zero", sync="manual")
    for _ in range(late):
        model(model.microbatch)
        model.backward(None)
    model(model.microbatch)
    with pytest.raises(InvalidArgument, match="p0 was added to more than once in a backward pass"):
        model.backward(None)
    for _ in range(each - late - 1):
        model(model.microbatch)
        model.backward(None)
    with pytest.raises(InvalidArgument, match="after 7 backward passes"):  # not averaged wrongly
        model.sync_gradients()
    net.zero_grad()
    for _ in range(each):
        model(model.microbatch)
        model.backward(None)
    model.sync_gradients()
    for k, p in enumerate(net.parts):
        assert p.grad.tobytes() == net.wanted(k), k


@pytest.mark.parametrize("change", ["none", "replaced"])
def test_gradient_that_lacks_the_sum_is_named(comm, change):
    each = 6
    net = Planned(random_plans("once", each * comm.size))
    model = DDP(net, comm, reproducible=each * comm.size, sync="manual")
    for _ in range(joined(comm, each) + 1):
        model(model.microbatch)
        model.backward(None)
    net.parts[1].grad = None if change == "none" else net.parts[1].grad / 2
    with pytest.raises(InvalidArgument, match="of p1 was set to None, or replaced, .* between two"):
        model(model.microbatch)


def torch_bits(net, each, total, backward, model=None):
    """The gradients of one step of `each` microbatches; by a DDP, or summed here."""
    net.zero_grad()
    found = []
    for number in range(each):
        number = number if model is None else model.microbatch
        x = torch.from_numpy(batch(number, 4)[0])
        backward(net if model is None else model, x)
        if model is None:
            found.append([p.grad.numpy().copy() for p in net.parameters()])
            net.zero_grad()
    if model is not None:
        model.sync_gradients()
        return [p.grad.numpy().tobytes() for p in net.parameters()]
    return [(summed(list(each_of)) / total).tobytes() for each_of in zip(*found, strict=True)]


@needs_torch
@pytest.mark.parametrize("each", [2, 3, 4])
@pytest.mark.parametrize("way", ["reentrant", "two backward passes"])
def test_bits_are_those_of_one_process_where_pytorch_adds_otherwise(comm, way, each):
    from torch.utils.checkpoint import checkpoint

    class Shared(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(6, 6).double()

        def forward(self, x):
            x.requires_grad_(True)
            if way != "reentrant":
                return self.layer(self.layer(x))
            for _ in range(2):  # each has a backward pass of its own, which adds
                x = checkpoint(self.layer, x, use_reentrant=True)
            return x

    def backward(model, x):
        loss = model(x).square().sum()
        if way == "two backward passes":
            loss.backward(retain_graph=True)
            (loss * 0.1).backward()
        else:
            loss.backward()

    alone, net = Shared(), Shared()
    random = np.random.default_rng(0)
    values = {n: torch.from_numpy(random.normal(size=p.shape)) for n, p in net.named_parameters()}
    for module in (alone, net):
        module.load_state_dict(values)
    total = each * comm.size
    wanted = torch_bits(alone, total, total, backward)
    model = DDP(net, comm, reproducible=total, sync="manual", init_sync=False)
    for _ in range(2):
        assert torch_bits(net, each, total, backward, model) == wanted
    model.close()


def cubed(p):
    """A hook that changes a gradient in place, not linearly."""
    with torch.no_grad():
        p.grad.pow_(3)


@needs_torch
@pytest.mark.parametrize("each", [2, 3, 4, 6])
def test_bits_are_those_of_one_process_where_a_hook_changes_gradients(comm, each):
    """It must have each microbatch's own, not sums."""
    alone, net = KITS[1].values[0].mlp(), KITS[1].values[0].mlp()
    for module in (alone, net):
        for p in module.parameters():
            p.register_post_accumulate_grad_hook(cubed)

    def backward(model, x):
        model(x).square().sum().backward()

    total = each * comm.size
    wanted = torch_bits(alone, total, total, backward)
    model = DDP(net, comm, reproducible=total, sync="manual", **SMALL)
    for _ in range(2):
        assert torch_bits(net, each, total, backward, model) == wanted


@needs_torch
def test_change_of_a_sum_is_named(comm):
    """As by clip_grad_norm_ after each backward pass, but the first."""
    each, net = 6, KITS[1].values[0].mlp()
    model = DDP(net, comm, reproducible=each * comm.size, sync="manual")
    x = torch.from_numpy(batch(0, 4)[0])
    for _ in range(joined(comm, each) + 1):
        model(x).square().sum().backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
    with pytest.raises(InvalidArgument, match="of 4.bias was changed in place in or after"):
        model(x)


def test_step_given_up_is_forgotten(comm):
    """By zero_grad(), as of a loss that is no number."""
    kit = KITS[0].values[0]
    net = kit.mlp()
    model = DDP(net, comm, reproducible=2 * comm.size, **SMALL)
    make, options = kit.optimizers()["momentum"]
    optimizer = make(net.parameters(), **options)
    for step in (7, 0, 1):
        optimizer.zero_grad()
        for k in range(1 if step == 7 else 2):
            assert model.microbatch == 2 * comm.rank + k
            x, labels = batch(100 * step + 2 * comm.rank + k, 4)
            kit.step(model, x, labels, 0.25)
        if step != 7:
            optimizer.step()
    assert [v.tobytes() for v in kit.values(net)] == alone(kit, 2 * comm.size, 2)


@pytest.mark.parametrize("kit", KITS)
def test_wrong_numbers_of_passes_are_named(comm, kit):
    net = kit.mlp()
    model = DDP(net, comm, reproducible=3 * comm.size, sync="manual")
    make, options = kit.optimizers()["sgd"]
    optimizer = make(net.parameters(), **options)
    x, labels = batch(0, 4)
    kit.step(model, x, labels, 0.25)
    for call in (optimizer.step, model.sync_gradients):
        with pytest.raises(InvalidArgument, match=r"after 1 backward pass: .* has 3 on each rank"):
            call()
    kit.step(model, x, labels, 0.25)
    with pytest.raises(InvalidArgument, match=r"step\(\) of an optimizer after 2 backward passes"):
        optimizer.step()
    kit.step(model, x, labels, 0.25)
    with pytest.raises(InvalidArgument, match="more than 3 backward passes"):
        kit.step(model, x, labels, 0.25)
    with pytest.raises(InvalidArgument, match=r"sync_gradients\(\) after 4 backward passes"):
        model.sync_gradients()
    optimizer.zero_grad()
    for _ in range(3):
        kit.step(model, x, labels, 0.25)
    model.sync_gradients()
    optimizer.step()


@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("each", [1, 2])
def test_step_without_zero_grad_is_named(comm, kit, each):
    """Each rank would count the mean of the step before once."""
    net = kit.mlp()
    model = DDP(net, comm, reproducible=each * comm.size, **SMALL)
    make, options = kit.optimizers()["sgd"]
    optimizer = make(net.parameters(), **options)
    x, labels = batch(0, 4)
    for _ in range(each):
        kit.step(model, x, labels, 0.25)
    optimizer.step()
    with pytest.raises(InvalidArgument, match=r"not zero before .*: call zero_grad\(\) before"):
        kit.step(model, x, labels, 0.25)
    with pytest.raises(InvalidArgument, match="were not averaged"):
        optimizer.step()


@pytest.mark.parametrize("kit", KITS)
def test_zero_grad_between_forward_and_backward_is_named(comm, kit):
    """What is kept of the step that is given up would be added."""
    net = kit.mlp()
    model = DDP(net, comm, reproducible=2 * comm.size, sync="manual")
    x, labels = batch(0, 4)
    kit.step(model, x, labels, 0.25)
    loss = model(kit.inputs(x))
    net.zero_grad()
    with pytest.raises(InvalidArgument, match="2 backward passes .* set to None, or replaced"):
        loss.sum().backward() if kit.name == "torch" else model.backward(np.ones_like(loss))


@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("sync", ["auto", "manual"])
def test_forwards_of_an_evaluation_are_no_microbatches(comm, kit, sync):
    net = kit.mlp()
    model = DDP(net, comm, reproducible=2 * comm.size, sync=sync, **SMALL)
    make, options = kit.optimizers()["momentum"]
    optimizer = make(net.parameters(), **options)
    for step in range(3):
        optimizer.zero_grad()
        for k in range(2):
            x, labels = batch(100 * step + 2 * comm.rank + k, 4)
            kit.step(model, x, labels, 0.25)
            model(kit.inputs(x))
        model.sync_gradients()
        model(kit.inputs(x))
        optimizer.step()
    assert [v.tobytes() for v in kit.values(net)] == alone(kit, 2 * comm.size, 3)


@pytest.mark.parametrize("kit", KITS)
def test_gradients_of_this_rank_are_not_taken_for_the_mean(comm, kit):
    """Assigned ones, of a step without a backward pass."""
    net = kit.mlp()
    model = DDP(net, comm, reproducible=2 * comm.size)
    make, options = kit.optimizers()["sgd"]
    optimizer = make(net.parameters(), **options)
    model(kit.inputs(batch(0, 4)[0]))
    for p in net.parameters():
        p.grad = p.grad + 1
    with pytest.raises(InvalidArgument, match="were not averaged"):
        optimizer.step()


def test_bad_input(comm):
    net = KITS[0].values[0].mlp()
    total = 2 * comm.size
    if comm.size > 1:
        with pytest.raises(InvalidArgument, match=rf"reproducible={total + 1} microbatches on "):
            DDP(net, comm, reproducible=total + 1)
    with pytest.raises(InvalidArgument, match="reproducible='yes'"):
        DDP(net, comm, reproducible="yes")
    with pytest.raises(InvalidArgument, match="with hook=: expected one of them"):
        DDP(net, comm, reproducible=total, hook=hooks.TopK(0.5))
    with pytest.raises(Unsupported, match="do not report additions"):
        bare = Weights(np.zeros(3))
        bare.weights = [Silent(np.zeros(3))]
        DDP(bare, comm, reproducible=total)
    model = DDP(net, comm, reproducible=total)
    with pytest.raises(InvalidArgument, match=r"no_sync\(\) with reproducible="), model.no_sync():
        pass
    with pytest.raises(InvalidArgument, match=r"join\(\) with reproducible="), model.join():
        pass
    with pytest.raises(Unsupported, match="the model has reproducible=: expected none"):
        ZeroOptimizer(KITS[0].values[0].optimizers()["sgd"][0], model, learning_rate=0.1)


class Silent:
    """A parameter without callbacks."""

    def __init__(self, data):
        self.data, self.grad = data, None


@needs_torch
def test_require_backward_grad_sync_is_refused(comm):
    model = DDP(torch.nn.Linear(6, 4), comm, reproducible=comm.size)
    with pytest.raises(InvalidArgument, match="require_backward_grad_sync with reproducible="):
        model.require_backward_grad_sync = False


@needs_torch
def test_running_averages_are_named(comm, caplog):
    net = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4))
    with caplog.at_level(logging.WARNING):
        DDP(net, comm, reproducible=comm.size)
    told = [r.getMessage() for r in caplog.records if "running averages" in r.getMessage()]
    assert (
        len(told) <= 1 if comm.rank else told[0].startswith("reproducible=: 1.running_mean and 1")
    )


@needs_torch
def test_other_numbers_of_threads_are_named(comm, monkeypatch):
    if comm.size < 2:
        pytest.skip("needs at least 2 ranks")
    net = torch.nn.Linear(6, 4)
    kind, rank = type(framework_of(net)), comm.rank
    monkeypatch.setattr(kind, "threads", lambda _: next(NUMBERS) + 100 * rank)
    with pytest.raises(InvalidArgument, match="threads of a rank"):
        DDP(net, comm, reproducible=comm.size)

"""What differs between replicas: found, named, and repaired by the majority."""

import socket
from contextlib import nullcontext

import ml_dtypes
import numpy as np
import pytest

from mpidist.errors import ReplicasDiffer
from mpidist.nn import Parameter
from mpidist.parallel import DDP, ZeroOptimizer
from tests.support.training_kits import (
    KITS,
    SMALL,
    assert_identical,
    batch,
    fingerprint,
    needs_torch,
    torch,
)

HOST = socket.gethostname()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kit", KITS)
def test_check_replicas_names_parameters_and_ranks(comm, kit):
    """One rank skips a step: the next comparison says which parameters differ, and where."""
    last, (x, labels) = comm.size - 1, batch()
    make, options = kit.optimizers()["sgd"]
    for every, zero, overlap in ((1, False, "polls"), (3, False, "none"), (2, True, "none")):
        net = kit.mlp()
        model = DDP(net, comm, check_replicas=every, overlap=overlap, **SMALL)
        optimizer = (
            ZeroOptimizer(make, model, **options) if zero else make(net.parameters(), **options)
        )
        names = [name for name, _ in model.reducer.grouping.named]

        def step(number, model=model, net=net, optimizer=optimizer, zero=zero):
            optimizer.zero_grad()
            kit.step(model, x, labels, 1.0)
            model.sync_gradients()
            if zero:  # its step is collective: something else has gone wrong on that rank
                optimizer.step()
            if zero and number == 1 and comm.rank == last:
                model.framework.values(model.reducer.grouping.named[2][1])[...] += 1
            elif not zero and (number != 1 or comm.rank != last):
                optimizer.step()

        raised = None
        for number in range(1, 2 * every + 2):
            try:
                step(number)
            except ReplicasDiffer as error:
                assert raised is None and number == every + (every == 1)
                raised = str(error)
                assert f"rank {comm.rank}: sync_gradients() number {number}" in raised
                wrong = names[2:3] if zero else names[:5]
                assert all(f"{name} on rank {last}" in raised for name in wrong)
                assert zero or f"and {len(names) - 5} more" in raised
                model.broadcast_parameters()
                optimizer.zero_grad()
        assert raised
        assert_identical(comm, kit, net)


@needs_torch
@pytest.mark.ranks(1, 2, 3)
def test_frozen_parameters_start_equal_and_are_compared(comm):
    """A replica is the whole model, also what of it is not learnt."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    for p in net.parameters():
        torch.nn.init.constant_(p, comm.rank + 1.0)
    net[0].requires_grad_(False)
    model = DDP(net, comm, check_replicas=1, sync="manual")
    assert all((p == 1).all() for p in net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    model.sync_gradients()
    torch.nn.init.constant_(net[0].weight, comm.rank + 1.0)
    every = ", ".join(map(str, range(1, comm.size)))
    told = pytest.raises(ReplicasDiffer, match=f"0.weight on ranks? {every};")
    with nullcontext() if comm.size == 1 else told:
        model.sync_gradients()


def flip(values, bit, element=0):
    """Flip a bit of an element of an array, in place."""
    one = np.array(values[np.unravel_index(element, values.shape)])
    one.view(f"u{one.itemsize}")[...] ^= one.view(f"u{one.itemsize}").dtype.type(1 << bit)
    values[np.unravel_index(element, values.shape)] = one


def train_with_flips(comm, kit, flips, zero):
    """Train; before step k flip a bit of the rank and parameter that are `flips[k]`.

    A step that repairs is made again.  Return names of parameters, bits at the end, and repairs.
    """
    net = kit.mlp()
    model = DDP(net, comm, check_replicas=1, differing="majority", **SMALL)
    make, options = kit.optimizers()["adam"]
    made = ZeroOptimizer(make, model, **options) if zero else make(net.parameters(), **options)
    for number in range(6):
        rank, index = flips.get(number, (None, 0))
        if comm.rank == rank:
            flip(kit.values(net)[index], 62 if number % 2 else 3)  # the largest of the exponent
        x, labels = batch(number)
        seen = -1
        while seen != model.repaired:
            seen = model.repaired
            made.zero_grad()
            kit.step(model, x[comm.rank :: comm.size], labels[comm.rank :: comm.size], 0.1)
            model.sync_gradients()
        made.step()
    names = [name for name, _ in model.reducer.grouping.named]
    return names, fingerprint(kit, net), model.repaired


@pytest.mark.ranks(3, 5)
@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("zero", [False, True], ids=["plain", "zero"])
@pytest.mark.parametrize("kit", KITS)
def test_flipped_bit_is_repaired_and_the_training_ends_as_without_it(comm, kit, zero, caplog):
    names, expected, repaired = train_with_flips(comm, kit, {}, zero)
    comm.barrier()
    assert repaired == 0 and "differ" not in caplog.text
    comm.barrier()
    last = comm.size - 1
    # Before which step, on which rank, in which parameter; each rank may fault twice, rank 0 too.
    flips = {1: (last, 0), 2: (0, 3), 4: (last, 1), 5: (1, 2)}
    _, bits, repaired = train_with_flips(comm, kit, flips, zero)
    assert (bits, repaired) == (expected, 4)
    comm.barrier()
    for number, (rank, index) in {2: flips[1], 4: flips[2], 7: flips[4], 9: flips[5]}.items():
        told = f"number {number}: parameters differ from those of most ranks: {names[index]} "
        assert f"{told}on rank {rank}; rank {rank} runs on {HOST}" in caplog.text or comm.rank


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kit", KITS)
def test_replicas_without_a_majority_are_named_and_left_alone(comm, kit):
    # Two halves, or on an odd number of ranks as many groups.
    first = comm.size // 2 if comm.size % 2 == 0 else 1
    net = kit.mlp()
    model = DDP(net, comm, check_replicas=1, differing="majority", **SMALL)
    x, labels = batch()
    kit.step(model, x, labels, 1.0)
    model.sync_gradients()
    if comm.rank >= first:
        flip(kit.values(net)[1], comm.rank // first)
    before = fingerprint(kit, net)
    name = model.reducer.grouping.named[1][0]
    ranks = list(range(first, comm.size))
    with pytest.raises(ReplicasDiffer) as caught:
        kit.step(model, x, labels, 1.0)
        model.sync_gradients()
    text = str(caught.value)
    told = f"{name} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}; "
    told += ", ".join(f"rank {rank} runs on {HOST}" for rank in (0, *ranks))
    assert f"those of rank 0: {told}; no values are those of more than half" in text
    assert fingerprint(kit, net) == before and model.repaired == 0


@pytest.mark.ranks(3)
@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("kit", KITS)
def test_third_fault_of_a_rank_raises(comm, kit):
    """As where its optimizer's momentum is what differs: repaired weights differ again."""
    net = kit.mlp()
    model = DDP(net, comm, check_replicas=1, differing="majority", **SMALL)
    make, options = kit.optimizers()["momentum"]
    optimizer = make(net.parameters(), **options)
    x, labels = batch()
    for number in range(4):
        optimizer.zero_grad()
        with (
            pytest.raises(ReplicasDiffer, match="rank 1 for the 3rd time")
            if number == 3
            else nullcontext()
        ):
            kit.step(model, x, labels, 1.0)
            model.sync_gradients()
        if comm.rank == 1 and number == 0:
            for gradient in kit.gradients(net):
                gradient += 1  # the momentum of this rank is another one from now on
        optimizer.step()
    assert model.repaired == 2


@pytest.mark.ranks(3)
@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("kit", KITS)
def test_without_a_repair_the_odd_rank_is_named_by_the_majority(comm, kit):
    net = kit.mlp()
    model = DDP(net, comm, check_replicas=2, **SMALL)
    x, labels = batch()
    for number in (1, 2):
        if number == 2 and comm.rank == 0:
            flip(kit.values(net)[0], 0)
        told = pytest.raises(ReplicasDiffer, match="most ranks: .* on rank 0; rank 0 runs on ")
        with told if number == 2 else nullcontext():
            kit.step(model, x, labels, 1.0)
            model.sync_gradients()
    others = list(range(1, comm.size))
    assert list(model.unlike_parameters().values()) == [others]


class Odd:
    """A module of arrays as they come: of every dtype, empty, strided, of unlike zeros and NaNs."""

    def __init__(self):
        random = np.random.default_rng(0)
        nan = np.array([0x7FC00000, 0x7FC00007, 0xFFC00001], np.uint32).view(np.float32)
        self.arrays = {
            "fp16": random.random(7).astype(np.float16),
            "bf16": random.random((3, 3)).astype(ml_dtypes.bfloat16),
            "empty": np.empty((0, 4), np.float32),
            "one": np.array(2.0),
            "zeros": np.array([0.0, -0.0, 0.0, -0.0, 0.0], np.float32),
            "nan": nan,
            "strided": np.zeros((6, 10), np.float32)[::2, 1::3],
            "turned": random.random((5, 3)).T,
            "pair": np.array([1.0, 1.0, 2.0, 2.0] * 9, np.float32),
        }
        self.named = [(name, Parameter(array)) for name, array in self.arrays.items()]

    def named_parameters(self):
        return self.named

    def parameters(self):
        return [p for _, p in self.named]


@pytest.mark.ranks(3)
@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("kind", ["arrays", pytest.param("torch", marks=needs_torch)])
def test_parameters_of_any_kind_are_compared_and_repaired_by_their_bits(comm, kind, caplog):
    module = Odd()
    arrays = module.arrays
    if kind == "torch":
        turned = {name: torch.from_numpy(a) for name, a in arrays.items() if name != "bf16"}
        turned["bf16"] = torch.from_numpy(arrays["bf16"].view(np.int16)).view(torch.bfloat16)
        assert not turned["strided"].is_contiguous() and not turned["turned"].is_contiguous()
        module = torch.nn.Module()
        for name, x in turned.items():
            module.register_parameter(name, torch.nn.Parameter(x))
    before = {name: x.tobytes() for name, x in arrays.items()}

    def exchange(x):
        x[:2], x[2:4] = x[2:4].copy(), x[:2].copy()

    changes = [(name, lambda x: flip(x, 0, x.size - 1)) for name, x in arrays.items() if x.size]
    changes += [("zeros", lambda x: flip(x, 31)), ("nan", lambda x: flip(x, 3)), ("pair", exchange)]
    for number, (name, change) in enumerate(changes):
        odd = number % comm.size
        model = DDP(module, comm, check_replicas=1, differing="majority", sync="manual")
        comm.barrier()
        seen = len(caplog.records)
        for repaired in (0, 1):
            if repaired and comm.rank == odd:
                change(arrays[name])
                assert arrays[name].tobytes() != before[name]
            model.sync_gradients()
            assert {name: x.tobytes() for name, x in arrays.items()} == before
            assert model.repaired == repaired
            comm.barrier()
            texts = [record.getMessage() for record in caplog.records[seen:]]
            comm.barrier()
            assert len(texts) == repaired or comm.rank
        assert f"most ranks: {name} on rank {odd}; " in "".join(texts) or comm.rank
        model.close()

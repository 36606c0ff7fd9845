"""Checkpoints: a resumed run has the same bits; what differs between ranks, and errors."""

import random
import re
import time
from pathlib import Path

import numpy as np
import pytest

from mpidist import Checkpoint, CollectiveConfig, run_simulated, shard
from mpidist.checkpoint import checkpoint
from mpidist.errors import CheckpointError, CommunicatorInUse, InvalidArgument
from mpidist.nn import SGD, Adam, Linear, Module, ReLU, Sequential
from mpidist.parallel import DDP, ZeroOptimizer
from mpidist.topology import Grid
from tests.support.rounds import rounds
from tests.support.training_kits import HOOKS, KITS, SMALL, Faulty, fingerprint, train

pytestmark = pytest.mark.ranks(1, 3, 4)


def trainer(comm, kit, optimizer_name, zero, seed=0):
    net = kit.mlp(seed)
    model = DDP(net, comm, overlap="none", **SMALL)
    make, options = kit.optimizers()[optimizer_name]
    if zero:
        return net, model, ZeroOptimizer(make, model, **options)
    return net, model, make(net.parameters(), **options)


def hooked_trainer(comm, kit, hook, seed=0):
    net = kit.mlp(seed)
    model = DDP(net, comm, overlap="none", hook=hook, **SMALL)
    make, options = kit.optimizers()["momentum"]
    return net, model, make(net.parameters(), **options)


def write_with_hook(comm, kit, folder, name):
    net, model, optimizer = hooked_trainer(comm, kit, HOOKS[name]())
    train(comm, kit, model, optimizer, steps=3)
    Checkpoint(folder, comm).save(3, model=model)
    assert any(state["residual"].any() for state in model.reducer.hook.save(model.buckets))
    return fingerprint(kit, net)


def read_with_hook(comm, kit, folder, name, before):
    """Residuals of another number of ranks are refused; without them the state loads."""
    checkpoint = Checkpoint(folder, comm)
    net, model, _ = hooked_trainer(comm, kit, HOOKS[name](), seed=7)
    first = fingerprint(kit, net)
    facts = rf"rank {comm.rank}: .*\b{before} ranks.*\b{comm.size}\b.*'hook'"
    with pytest.raises(InvalidArgument, match=facts):
        checkpoint.load(model=model)
    assert fingerprint(kit, net) == first  # nothing was loaded
    state = checkpoint.load()["model"]
    del state["hook"]
    model.load_state_dict(state)
    return fingerprint(kit, net)


class Counting(Sequential):
    """With a buffer that differs from rank to rank before it is averaged."""

    def __init__(self, comm, seed):
        random = np.random.default_rng(seed)
        super().__init__(Linear(6, 16, seed=random), ReLU(), Linear(16, 3, seed=random))
        self.noise, self.mean = np.random.default_rng(comm.rank), np.zeros(40, np.float32)

    def named_buffers(self):
        return [("mean", self.mean)]

    def forward(self, x):
        self.mean += self.noise.standard_normal(40).astype(np.float32)
        return super().forward(x.astype(np.float32))

    def state_dict(self):
        return {**super().state_dict(), "mean": self.mean.copy()}

    def load_state_dict(self, state):
        self.mean[...] = state["mean"]
        super().load_state_dict({k: v for k, v in state.items() if k != "mean"})


def counting_trainer(comm, zero, seed, **options):
    net = Counting(comm, seed)
    model = DDP(net, comm, overlap="none", buffers="average", **options)
    if zero:
        return net, model, ZeroOptimizer(Adam, model)
    return net, model, Adam(net.parameters())


def write_with_settings(comm, kit, folder, zero, **options):
    """Save after three steps; give the bits after four more, and the ways of adding."""
    net, model, optimizer = counting_trainer(comm, zero, 0, **options)
    train(comm, kit, model, optimizer, steps=3)
    Checkpoint(folder, comm).save(3, model=model, optimizer=optimizer)
    net.noise = np.random.default_rng((comm.rank, 1))
    train(comm, kit, model, optimizer, steps=4)
    return all_bits(net), ways(model, optimizer)


def read_with_settings(comm, kit, folder, zero, order, **options):
    net, model, optimizer = counting_trainer(comm, zero, 5, **options)
    objects = {"model": model, "optimizer": optimizer}
    Checkpoint(folder, comm).load(**{name: objects[name] for name in order})
    net.noise = np.random.default_rng((comm.rank, 1))
    train(comm, kit, model, optimizer, steps=4)
    return all_bits(net), ways(model, optimizer)


def all_bits(net):
    return net.mean.tobytes() + b"".join(p.data.tobytes() for p in net.parameters())


def ways(model, optimizer):
    state = optimizer.state_dict()
    return model.resume_state()["sending"], state.get("sending")


def write_for_others(comm, kit, folder, optimizer_name, zero):
    """Save, and give all of model and optimizer, to be compared on another number of ranks."""
    net, model, optimizer = trainer(comm, kit, optimizer_name, zero)
    train(comm, kit, model, optimizer, steps=3)
    Checkpoint(folder, comm).save(3, model=model, optimizer=optimizer)
    return fingerprint(kit, net), joined_state(comm, model, optimizer, zero)


def read_from_others(comm, kit, folder, optimizer_name, zero):
    net, model, optimizer = trainer(comm, kit, optimizer_name, zero, seed=5)
    Checkpoint(folder, comm).load(model=model, optimizer=optimizer)
    found = fingerprint(kit, net), joined_state(comm, model, optimizer, zero)
    train(comm, kit, model, optimizer, steps=1)
    return found


def joined_state(comm, model, optimizer, zero):
    """The optimizer's arrays, whole, by parameter and name."""
    if not zero:
        state = optimizer.state_dict()["state"]
        return {
            (index, key): np.asarray(value).tobytes()
            for index, kept in state.items()
            for key, value in kept.items()
        }
    parts = {}
    for piece in optimizer.pieces:
        kept = model.framework.optimizer_state(optimizer.optimizer, piece.flat)
        for key, value in kept.items():
            parts[piece.name, key, piece.start] = np.asarray(value).tobytes()
    joined = {}
    for name, key, start in sorted(
        everything := {k: v for each in comm.allgather_object(parts) for k, v in each.items()}
    ):
        whole = len(everything[name, key, start]) <= 8 and key in ("step", "steps")
        before = b"" if whole else joined.get((name, key), b"")
        joined[name, key] = before + everything[name, key, start]
    return joined


def parameters(fill):
    """A state of arrays of several sizes, of which the largest is written by all ranks."""
    return {"weight": np.full(40000, fill, np.float32), "bias": np.full(7, fill), "on": {"k": fill}}


def write_per_rank(comm, folder):
    saved = {"model": np.arange(9.0), "rng": np.random.default_rng(comm.rank)}
    Checkpoint(folder, comm).save(1, **saved, per_rank={"seen": comm.rank})


def read_per_rank(comm, folder, before):
    """On another number of ranks: an error that says what was saved, and `skip` loads the rest."""
    checkpoint = Checkpoint(folder, comm)
    for objects in ({}, {"rng": np.random.default_rng(0)}):
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load(**objects)
        facts = rf"rank {comm.rank}: load: .*\brng .*\b{before} ranks\b.*\b{comm.size}\b"
        assert re.search(facts + r".*skip=\['rng'\]", str(caught.value)), caught.value
    found = checkpoint.load(skip=("rng", "seen"))
    np.testing.assert_array_equal(found["model"], np.arange(9.0))
    assert set(found) == {"model", "step"}
    with pytest.raises(CheckpointError, match=r"\bsene\b.*model, rng, seen"):
        checkpoint.load(skip=["sene"])
    with pytest.raises(InvalidArgument, match=r"skip=\['rng'\]: rng "):
        checkpoint.load(skip=["rng"], rng=np.random.default_rng(0))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("zero", (False, True), ids=("whole", "zero"))
@pytest.mark.parametrize("kit", KITS)
def test_resumed_run_has_the_same_bits(comm, kit, folder, zero):
    net, model, optimizer = trainer(comm, kit, "adam", zero)
    checkpoint = Checkpoint(folder, comm)
    train(comm, kit, model, optimizer, steps=3)
    checkpoint.save(3, model=model, optimizer=optimizer, note={"loss": 0.1, "seen": (1, [2, None])})
    train(comm, kit, model, optimizer, steps=4)
    again, other, state = trainer(comm, kit, "adam", zero, seed=7)
    found = Checkpoint(folder, comm).load(model=other, optimizer=state)
    assert found == {"step": 3, "note": {"loss": 0.1, "seen": (1, [2, None])}}
    assert [b.names for b in other.buckets] == [b.names for b in model.buckets]
    assert [b.algorithm for b in other.buckets] == [b.algorithm for b in model.buckets]
    train(comm, kit, other, state, steps=4)
    assert fingerprint(kit, again) == fingerprint(kit, net)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("name", HOOKS)
def test_what_hooks_left_out_is_resumed(comm, kit, folder, name):
    """The resumed run has the bits of the one that was not interrupted."""
    checkpoint = Checkpoint(folder, comm)
    net, model, optimizer = hooked_trainer(comm, kit, HOOKS[name]())
    train(comm, kit, model, optimizer, steps=3)
    checkpoint.save(3, model=model, optimizer=optimizer)
    train(comm, kit, model, optimizer, steps=4)
    again, other, state = hooked_trainer(comm, kit, HOOKS[name](), seed=7)
    checkpoint.load(model=other, optimizer=state)
    train(comm, kit, other, state, steps=4)
    assert fingerprint(kit, again) == fingerprint(kit, net)


@pytest.mark.parametrize("zero", (False, True), ids=("whole", "zero"))
@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("optimizer", ("momentum", "adam"))
def test_load_on_other_numbers_of_ranks_has_the_same_bits(kit, optimizer, zero, tmp_path):
    """Model and optimizer have the same bits on any number of ranks."""
    for before, after in ((3, 2), (2, 1), (1, 4)):
        folder = tmp_path / f"{before}-{after}"
        saved = run_simulated(
            before, lambda c, f=folder: write_for_others(c, kit, f, optimizer, zero)
        )
        found = run_simulated(
            after, lambda c, f=folder: read_from_others(c, kit, f, optimizer, zero)
        )
        assert len(set(map(str, [*saved, *found]))) == 1


@pytest.mark.parametrize("before, after", ((3, 2), (1, 2), (2, 1)))
def test_per_rank_states_on_other_sizes_are_refused(before, after, tmp_path):
    run_simulated(before, lambda comm: write_per_rank(comm, tmp_path))
    run_simulated(after, lambda comm: read_per_rank(comm, tmp_path, before))


@pytest.mark.parametrize("before, after", ((4, 2), (2, 3), (3, 1)))
@pytest.mark.parametrize("name", ("top-k", "powersgd"))
def test_hook_state_on_other_numbers_of_ranks_is_refused(name, before, after, tmp_path):
    kit = KITS[0].values[0]
    saved = run_simulated(before, lambda c: write_with_hook(c, kit, tmp_path, name))
    loaded = run_simulated(after, lambda c: read_with_hook(c, kit, tmp_path, name, before))
    assert len({*saved, *loaded}) == 1


@pytest.mark.parametrize("order", (("model", "optimizer"), ("optimizer", "model")), ids="-".join)
@pytest.mark.parametrize("zero", (False, True), ids=("whole", "zero"))
def test_other_settings_change_no_bits(zero, order, tmp_path):
    """Buckets and algorithms are those of the run that saved, though another was asked for now."""
    kit, before = KITS[0].values[0], {**SMALL, "algorithm": "ring"}
    saved = run_simulated(
        5,
        lambda c: write_with_settings(c, kit, tmp_path, zero, **before),
        config=CollectiveConfig(local_allreduce="ring"),
    )
    found = run_simulated(
        5,
        lambda c: read_with_settings(c, kit, tmp_path, zero, order, algorithm="linear"),
        config=CollectiveConfig(local_allreduce="linear"),
    )
    assert found == saved
    assert saved[0][1][0]["buffers"] == {"float32": "ring"}


def test_error_in_comparing_is_known_on_all(tmp_path, monkeypatch):
    """Rank 0 alone compares the states, which takes the memory of all of them."""

    def compare(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(checkpoint, "_compare", compare)

    def act(comm):
        with pytest.raises(CheckpointError, match="on rank 0: MemoryError: no room"):
            Checkpoint(tmp_path, comm).save(1, w=1)

    run_simulated(3, act)


class Shuffled(Module):
    """Layers that are not used in the order of their names."""

    def __init__(self, seed):
        random = np.random.default_rng(seed)
        self.last, self.first, self.middle = (Linear(9, 9, seed=random) for _ in range(3))

    def forward(self, x):
        return self.last(self.middle(self.first(x)))

    def backward(self, grad):
        return self.first.backward(self.middle.backward(self.last.backward(grad)))


def test_save_before_the_first_step_resumes_alike(comm, folder):
    """The run that is resumed from it rebuilds them after its first step, as the first run did."""
    checkpoint, ends = Checkpoint(folder, comm), []
    for seed in (0, 1):
        net = Shuffled(seed)
        model = DDP(net, comm, 400, 400, algorithm="ring")
        optimizer = SGD(net.parameters(), 0.01)
        if seed:
            checkpoint.load(model=model)
        else:
            checkpoint.save(0, model=model)
        random = np.random.default_rng(comm.rank)
        for _ in range(3):
            model.zero_grad()
            model.backward(model(random.normal(size=(4, 9)).astype(np.float32)))
            model.sync_gradients()
            optimizer.step()
        names = [bucket.names for bucket in model.buckets]
        ends.append((names, [p.data.tobytes() for p in net.parameters()]))
    assert ends[0] == ends[1]
    if comm.size > 1:
        assert "last.weight" in ends[0][0][0]


def test_load_finds_damage_on_every_rank(comm, folder):
    checkpoint = Checkpoint(folder, comm)
    assert checkpoint.load() is None and checkpoint.steps() == []
    data = np.arange(5000.0)
    for step in (1, 2):
        path = checkpoint.save(step, data=data + step, empty=np.zeros((0, 3), np.int8))
    comm.barrier()
    if comm.rank == 0:
        victim = next(file for file in sorted(path.glob("*.safetensors")) if file.stat().st_size)
        content = bytearray(victim.read_bytes())
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    comm.barrier()
    with pytest.raises(CheckpointError, match=r"rank-\d+\.\w+ .*\bdata\b.*\[1, 2\]"):
        checkpoint.load()
    found = checkpoint.load(step=1)
    np.testing.assert_array_equal(found["data"], data + 1)
    assert found["empty"].shape == (0, 3) and found["empty"].dtype == np.int8
    comm.barrier()
    if comm.rank == 0:
        manifest = path / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"step": 2', '"step": 3'))
    comm.barrier()
    with pytest.raises(CheckpointError, match=r"manifest\.json .*checksum"):
        checkpoint.load()
    with pytest.raises(CheckpointError, match=r"step 9: .*\[1, 2\]"):
        checkpoint.load(step=9)


def test_save_and_load_wrong_arguments_are_named(comm, folder):
    checkpoint = Checkpoint(folder, comm)
    with pytest.raises(CheckpointError, match=r"model/layers/1 .*\bset\b"):
        checkpoint.save(1, model={"layers": [1, {2}]})
    assert checkpoint.steps() == []
    last = comm.size - 1
    with pytest.raises(CheckpointError, match=rf"on rank {last}: .*\bx .*\bobject\b"):
        checkpoint.save(1, x=object() if comm.rank == last else 1)
    with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: step=-1"):
        checkpoint.save(-1)
    with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: keep=0"):
        Checkpoint(folder, comm, keep=0)
    with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: folder=None: "):
        Checkpoint(None, comm)
    with pytest.raises(InvalidArgument, match=rf"rank {comm.rank}: load: x .*\bint\b"):
        checkpoint.load(x=3)
    with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: step='1': "):
        checkpoint.load("1")
    checkpoint.save(1, x=1)
    file = folder / "step-00000001.0" / "manifest.json"
    for below in (Checkpoint(file, comm), Checkpoint(file / "more", comm)):
        with pytest.raises(CheckpointError, match=r"load: on rank 0: .*manifest.json"):
            below.load()
    with pytest.raises(CheckpointError, match=r"step-00000001\.0 .*\by\b.*\bx\b"):
        checkpoint.load(y=shard([], comm))


def test_save_of_unlike_things_is_refused_on_every_rank(comm, folder):
    checkpoint = Checkpoint(folder, comm)
    last = int(comm.rank == comm.size - 1)
    with pytest.raises(CheckpointError, match=r"\bs/a/b\b"):
        checkpoint.save(1, s={"a/b": np.ones(2), "a": {"b": np.zeros(2)}})
    if comm.size > 1:
        for step, objects, said in (
            (1 + last, {"x": 1}, r"rank \d has step=2 where rank 0 has 1;"),
            (1, {f"x{last}": 1}, r"rank \d has names=\['x1'\] where"),
            (1, {"x": np.zeros(2 + last)}, r"x is .*\(3,\) on rank \d and .*\(2,\) on rank 0"),
        ):
            with pytest.raises(CheckpointError, match=said):
                checkpoint.save(step, **objects)
    assert checkpoint.steps() == []
    checkpoint.save(1, x=1)


def test_load_of_whole_and_divided_states_is_not_mixed_up(comm, folder):
    checkpoint = Checkpoint(folder, comm)
    divided, whole = (counting_trainer(comm, zero, 0)[1:] for zero in (True, False))
    checkpoint.save(1, optimizer=divided[1])
    with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: load: optimizer .*ZeroOptimizer"):
        checkpoint.load(optimizer=whole[1])
    checkpoint.save(2, optimizer=whole[1])
    with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: state .*ZeroOptimizer"):
        checkpoint.load(optimizer=divided[1])


@pytest.mark.mpi(min_size=2)
def test_save_of_states_that_differ_is_refused(comm, folder):
    """What is not the same on all ranks, and not declared: an error names the leaf and ranks."""
    checkpoint, last = Checkpoint(folder, comm), comm.size - 1
    own = comm.rank == last
    nan = np.array([np.nan, 1.0])
    negative = nan.view(np.int64) ^ np.array([1, 0])
    model = Linear(150, 150, seed=0)
    model.weight.data[-1, -1] += own  # the last of 22,500 elements
    cases = {
        "array": (np.full(3, comm.rank == last), "x"),
        "one bit of a NaN": (negative.view(float) if own else nan, "x"),
        "sign of a zero": (-0.0 if own else 0.0, "x"),
        "type": (True if own else 1, "x"),
        "in a list": ([1, (2, "last" if own else "first")], "x/1/1"),
        "length of a list": ([1] * (2 + own), "x"),
        "key": ({"a": 1, **({"b": 2} if own else {})}, "x/b"),
        "missing key": ({"a": 1, **({} if own else {"b": 2})}, "x/b"),
        "array or number": ({"a": np.ones(1) if own else 1.0}, "x/a"),
        "model": (model, "x/weight"),
    }
    for what, (value, leaf) in cases.items():
        with pytest.raises(CheckpointError) as caught:
            checkpoint.save(1, x=value, same=parameters(1))
        found = str(caught.value)
        ranks = ", ".join(map(str, range(last))) if what == "key" else last
        assert f"rank {comm.rank}: save" in found and f"{leaf} differs on rank {ranks}" in found
        assert "per_rank=['x']" in found and "same" not in found.replace("not the same", "")
    assert checkpoint.steps() == [] and not list(Path(checkpoint.folder).glob("*"))
    checkpoint.save(1, x=nan, same=parameters(1))  # and it goes on; NaN equals NaN
    assert checkpoint.load()["same"]["on"] == {"k": 1}


def test_per_rank_states_come_back_to_their_rank(comm, folder):
    """Declared, by name or in a mapping: each rank gets its own back."""
    model, order = Linear(40, 40, seed=comm.rank), shard(range(9), comm)
    wanted = model.weight.data.copy()
    mine = {"model": model, "state": parameters(comm.rank)}
    names = ("model", "state"), ["model", "state"], {"model", "state"}
    forms = [*({**mine, "per_rank": which} for which in names), {"per_rank": mine}]
    for step, form in enumerate(forms):
        Checkpoint(folder, comm).save(step, **form, order=order)
        model.weight.data[:] = -1
        found = Checkpoint(folder, comm).load(step, model=model)
        np.testing.assert_array_equal(model.weight.data, wanted)
        np.testing.assert_array_equal(found["state"]["weight"], parameters(comm.rank)["weight"])
        assert found["state"]["on"] == {"k": comm.rank} and found["order"]["epoch"] == 0
    # One name as a str, in place of the last checkpoint, which had a model too.
    Checkpoint(folder, comm).save(3, per_rank="state", state=parameters(comm.rank), order=order)
    found = Checkpoint(folder, comm).load(3)
    assert found["state"]["on"] == {"k": comm.rank}
    assert "model" not in found
    with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: per_rank=.*modle.*: .*model"):
        Checkpoint(folder, comm).save(5, per_rank=("modle",), model=model)
    with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: per_rank=.*: model "):
        Checkpoint(folder, comm).save(5, per_rank={"model": model}, model=model)
    if comm.size > 1:
        other = ("order",) if comm.rank else ()
        with pytest.raises(CheckpointError, match=r"save: rank \d has per_rank="):
            Checkpoint(folder, comm).save(5, per_rank=other, order=order)


def sources(seed):
    return {
        "generator": np.random.default_rng(seed),
        "older": np.random.RandomState(seed),
        "mersenne": np.random.Generator(np.random.MT19937(seed)),
        "python": random.Random(seed),
    }


def drawn(found):
    return [
        [float(source.random()) for name, source in found.items() if name != "older"],
        found["older"].random_sample(3).tolist(),
    ]


def test_random_states_are_per_rank(comm, folder):
    """Without being declared: each rank goes on with the numbers that it would have drawn."""
    checkpoint = Checkpoint(folder, comm)
    mine, again = sources(comm.rank), sources(99)
    drawn(mine)
    checkpoint.save(1, **mine)
    checkpoint.load(**again)
    wanted = drawn(mine)
    assert drawn(again) == wanted
    assert comm.size == 1 or comm.allgather_object(wanted)[0] != comm.allgather_object(wanted)[1]
    assert checkpoint.load()["generator"]["bit_generator"] == "PCG64"


def test_buffers_follow_the_policy_of_ddp(comm, folder):
    """Rank 0's for "broadcast", every rank's own for "keep"; "average" has equal ones, or fails."""
    checkpoint = Checkpoint(folder, comm)
    for step, how in enumerate(("broadcast", "keep", "average")):
        net = Counting(comm, 0)
        model = DDP(net, comm, overlap="none", buffers=how)
        net.mean[...] = comm.rank + 1  # as after a forward, before sync_gradients()
        if how == "average" and comm.size > 1:
            with pytest.raises(CheckpointError, match="model/module/mean .*rank 1"):
                checkpoint.save(step, model=model)
            continue
        checkpoint.save(step, model=model)
        net.mean[...] = -1
        checkpoint.load(step, model=model)
        assert (net.mean == (comm.rank + 1 if how == "keep" else 1)).all()


def test_divided_states_of_stages_are_kept_apart(comm, folder):
    """A grid: what replicas have in common is checked and saved by stage, ZeRO's slices too."""
    pipe = 2 if comm.size % 2 == 0 else 1
    grid = Grid(comm, pipe=pipe)
    net = Linear(60, 60, seed=grid.pipe_index)  # of equal shapes, and other values
    model = DDP(net, grid.data, overlap="none")
    optimizer = ZeroOptimizer(Adam, model)
    model.backward(model(np.ones((2, 60), np.float32)) + grid.pipe_index)
    model.sync_gradients()
    optimizer.step()
    objects = {"model": model, "optimizer": optimizer}
    checkpoint, wanted = Checkpoint(folder, grid), net.weight.data.copy()
    checkpoint.save(1, **objects, state=parameters(grid.pipe_index))
    moments = [
        v.copy()
        for kept in optimizer.optimizer.state.values()
        for v in kept.values()
        if hasattr(v, "copy")
    ]
    again = DDP(Linear(60, 60, seed=9), grid.data, overlap="none")
    other = ZeroOptimizer(Adam, again)
    found = Checkpoint(folder, grid).load(model=again, optimizer=other)
    np.testing.assert_array_equal(again.module.weight.data, wanted)
    assert found["state"]["on"] == {"k": grid.pipe_index}
    now = [
        v for kept in other.optimizer.state.values() for v in kept.values() if hasattr(v, "copy")
    ]
    assert len(now) == len(moments) > 0
    for mine, before in zip(now, moments, strict=True):
        np.testing.assert_array_equal(mine, before)
    if pipe > 1:
        with pytest.raises(CheckpointError, match="save: .*model/module"):
            Checkpoint(folder, comm).save(2, **objects)
        with pytest.raises(CheckpointError, match=r"per stage, .*2 stages.*\bgrid\b"):
            Checkpoint(folder, comm).load(1)
        with pytest.raises(CheckpointError, match=r"2 stages, .*\b1: .*skip="):
            Checkpoint(folder, Grid(comm, pipe=1)).load(1)
    if grid.data.size > 1:
        net.weight.data[0, 0] += grid.data_index
        with pytest.raises(CheckpointError, match=r"model/\d/module/weight .*rank 1"):
            checkpoint.save(2, **objects)


class Untold(Exception):
    """Has no text, and cannot be pickled."""

    def __str__(self):
        raise RuntimeError("no text")

    def __reduce__(self):
        raise RuntimeError("no pickle")


class Property:
    @property
    def state_dict(self):
        raise KeyError("property")

    load_state_dict = state_dict


def test_error_of_one_rank_is_known_on_all(comm, folder):
    """Soon, as CheckpointError, whatever they are; and the communicator stays in step."""
    checkpoint, last = Checkpoint(folder, comm), comm.rank == comm.size - 1
    several = comm.size > 1  # what all ranks raise is raised as it is
    checkpoint.save(0, model=Faulty("", None))

    def refused(match, error, act):
        begun = time.monotonic()
        with pytest.raises(CheckpointError if several else error, match=match):
            act()
        assert time.monotonic() - begun < 10  # mostly a few milliseconds; no deadline passes
        assert comm.allreduce(1) == comm.size

    errors = (
        RuntimeError("one"),
        MemoryError("all"),
        OSError("\ud800"),
        Untold(),
        CommunicatorInUse("x"),
    )
    for error in errors:

        def act(error=error):
            if last:
                raise error

        said = rf"on rank {comm.size - 1}: {type(error).__name__}" if several else "."
        faulty = {where: Faulty(where, act) for where in ("save", "load")}
        with pytest.raises(CheckpointError, match=type(error).__name__):
            checkpoint.save(1, model=faulty["save"])
        if several or not isinstance(error, Untold):  # whose text pytest would want
            refused(said, type(error), lambda f=faulty["load"]: checkpoint.load(model=f))
    one = Property() if last else Faulty("", None)
    refused("property", KeyError, lambda: checkpoint.save(1, model=one))
    refused("property", KeyError, lambda: checkpoint.load(model=one))
    wrong = [{"step": "x"}, {"per_rank": 5}, {"per_rank": {5: 1}}, {"per_rank": {"model": 1}}]
    for options in wrong:
        given = {"step": 1, **(options if last else {})}
        word = re.escape(next(iter(options)))
        refused(word, InvalidArgument, lambda g=given: checkpoint.save(**g, model=1))
    for options in ({"step": -1}, {"skip": 7}, {"skip": "model", "model": Faulty("", None)}):
        given = options if last else {}
        word = next(iter(options))
        refused(word, InvalidArgument, lambda g=given: checkpoint.load(**g))
    assert checkpoint.steps() == [0]


def test_save_and_load_take_few_rounds(tmp_path, monkeypatch):
    """Five and three; why each is needed is said in save() and load()."""
    state = {"w": np.arange(40_000.0), "n": 3}
    with rounds(monkeypatch) as called:
        run_simulated(3, lambda comm: Checkpoint(tmp_path, comm).save(1, state=state))
        saved, called[:] = sorted(called), []
        run_simulated(3, lambda comm: Checkpoint(tmp_path, comm).load())
    for found, count in ((saved, 5), (sorted(called), 3)):
        assert found == sorted([(rank, "allgather_object") for rank in range(3)] * count)


def test_load_of_a_folder_that_cannot_be_read_is_refused(tmp_path):
    """On all ranks: only rank 0 looks."""
    (tmp_path / "file").touch()

    def load(comm):
        with pytest.raises(CheckpointError, match="load: on rank 0: .*file cannot be read: "):
            Checkpoint(tmp_path / "file", comm).load()

    for size in (1, 3):
        run_simulated(size, load)

"""Checkpoints on any communicator, with any library."""

import json
from pathlib import Path

import numpy as np
import pytest
from training_cases import SMALL, train
from training_kits import fingerprint
from zero_cases import HOOKS

from mpidist.errors import CheckpointError, InvalidArgument
from mpidist.nn import SGD, Adam, Linear, Module, ReLU, Sequential
from mpidist.parallel import DDP, Checkpoint, ZeroOptimizer, shard


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


def what_hooks_left_out_is_resumed(comm, kit, folder, name):
    """The resumed run has the bits of the one that was not interrupted."""
    checkpoint = Checkpoint(same_folder(comm, folder), comm)
    net, model, optimizer = hooked_trainer(comm, kit, HOOKS[name]())
    train(comm, kit, model, optimizer, steps=3)
    checkpoint.save(3, model=model, optimizer=optimizer)
    train(comm, kit, model, optimizer, steps=4)
    again, other, state = hooked_trainer(comm, kit, HOOKS[name](), seed=7)
    checkpoint.load(model=other, optimizer=state)
    train(comm, kit, other, state, steps=4)
    assert fingerprint(kit, again) == fingerprint(kit, net)


def pending(model):
    """What hooks of all ranks have left out so far, as the mean over the ranks."""
    states = model.comm.allgather_object(model.reducer.hook.save(model.buckets))
    every = [[kept.get("residual", 0) for kept in state] for state in states]
    return [sum(left) / model.comm.size for left in zip(*every, strict=True)]


def write_left_out(comm, kit, folder, name):
    net, model, optimizer = hooked_trainer(comm, kit, HOOKS[name]())
    train(comm, kit, model, optimizer, steps=3)
    Checkpoint(folder, comm).save(3, model=model)
    return pending(model)


def read_left_out(comm, kit, folder, name):
    """On another number of ranks the mean of what is to be made up for is the same."""
    model = hooked_trainer(comm, kit, HOOKS[name]())[1]
    Checkpoint(folder, comm).load(model=model)
    return pending(model)


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
    return model.state_dict()["sending"], state.get("sending")


def same_folder(comm, folder):
    return Path(comm.broadcast_object(str(folder)))


def a_resumed_run_has_the_same_bits(comm, kit, folder, optimizer_name, zero):
    folder = same_folder(comm, folder)
    net, model, optimizer = trainer(comm, kit, optimizer_name, zero)
    checkpoint = Checkpoint(folder, comm)
    train(comm, kit, model, optimizer, steps=3)
    checkpoint.save(3, model=model, optimizer=optimizer, note={"loss": 0.1, "seen": (1, [2, None])})
    train(comm, kit, model, optimizer, steps=4)
    again, other, state = trainer(comm, kit, optimizer_name, zero, seed=7)
    found = Checkpoint(folder, comm).load(model=other, optimizer=state)
    assert found == {"step": 3, "note": {"loss": 0.1, "seen": (1, [2, None])}}
    assert [b.names for b in other.buckets] == [b.names for b in model.buckets]
    assert [b.algorithm for b in other.buckets] == [b.algorithm for b in model.buckets]
    train(comm, kit, other, state, steps=4)
    assert fingerprint(kit, again) == fingerprint(kit, net)


class Shuffled(Module):
    """Layers that are not used in the order of their names."""

    def __init__(self, seed):
        random = np.random.default_rng(seed)
        self.last, self.first, self.middle = (Linear(9, 9, seed=random) for _ in range(3))

    def forward(self, x):
        return self.last(self.middle(self.first(x)))

    def backward(self, grad):
        return self.first.backward(self.middle.backward(self.last.backward(grad)))


def a_checkpoint_before_the_first_step_does_not_fix_buckets(comm, folder):
    """The run that is resumed from it rebuilds them after its first step, as the first run did."""
    checkpoint, ends = Checkpoint(same_folder(comm, folder), comm), []
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
        kept = model.framework.optimizer_state(optimizer.optimizer, piece.made)
        for key, value in kept.items():
            parts[piece.name, key, piece.start] = np.asarray(value).tobytes()
    joined = {}
    for name, key, start in sorted(everything := merged(comm.allgather_object(parts))):
        whole = len(everything[name, key, start]) <= 8 and key in ("step", "steps")
        before = b"" if whole else joined.get((name, key), b"")
        joined[name, key] = before + everything[name, key, start]
    return joined


def merged(tables):
    return {key: value for table in tables for key, value in table.items()}


def damage_is_found_on_every_rank(comm, folder):
    folder = same_folder(comm, folder)
    checkpoint = Checkpoint(folder, comm)
    assert checkpoint.load() is None and checkpoint.steps() == []
    data = np.arange(5000.0)
    for step in (1, 2):
        path = checkpoint.save(step, data=data + step, empty=np.zeros((0, 3), np.int8))
    comm.barrier()
    if comm.rank == 0:
        victim = next(file for file in sorted(path.glob("*.bin")) if file.stat().st_size)
        content = bytearray(victim.read_bytes())
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    comm.barrier()
    with pytest.raises(CheckpointError, match=r"damaged: the checksum of data .*steps \[1, 2\]"):
        checkpoint.load()
    found = checkpoint.load(step=1)
    np.testing.assert_array_equal(found["data"], data + 1)
    assert found["empty"].shape == (0, 3) and found["empty"].dtype == np.int8
    comm.barrier()
    if comm.rank == 0:
        manifest = path / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"step": 2', '"step": 3'))
    comm.barrier()
    with pytest.raises(CheckpointError, match="manifest.json is damaged"):
        checkpoint.load()
    with pytest.raises(CheckpointError, match=r"step 9: there are \[1, 2\]"):
        checkpoint.load(step=9)


def old_ones_are_removed(comm, folder):
    folder = same_folder(comm, folder)
    checkpoint = Checkpoint(folder, comm, keep=2)
    for step in (1, 5, 3, 9, 9):
        checkpoint.save(step, value=step)
    comm.barrier()
    assert checkpoint.steps() == [5, 9]
    assert checkpoint.load()["value"] == 9
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000005.0", "step-00000009.1"]


def what_cannot_be_saved_is_named(comm, folder):
    folder = same_folder(comm, folder)
    checkpoint = Checkpoint(folder, comm)
    with pytest.raises(CheckpointError, match="model/layers/1 is of set: allowed are"):
        checkpoint.save(1, model={"layers": [1, {2}]})
    assert checkpoint.steps() == []
    last = comm.size - 1
    with pytest.raises(CheckpointError, match=f"on rank {last}: .*x is of object"):
        checkpoint.save(1, x=object() if comm.rank == last else 1)
    with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: step=-1"):
        checkpoint.save(-1)
    with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: keep=0"):
        Checkpoint(folder, comm, keep=0)
    with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: folder=None: allowed are paths"):
        Checkpoint(None, comm)
    with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: load: x is of int: allowed are"):
        checkpoint.load(x=3)
    with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: step='1': allowed are"):
        checkpoint.load("1")
    checkpoint.save(1, x=1)
    file = folder / "step-00000001.0" / "manifest.json"
    for below in (Checkpoint(file, comm), Checkpoint(file / "more", comm)):
        with pytest.raises(CheckpointError, match=r"load: on rank 0: .*manifest.json"):
            below.load()
    with pytest.raises(CheckpointError, match="has no y, but x"):
        checkpoint.load(y=shard([], comm))


def unlike_things_are_refused_on_every_rank(comm, folder):
    checkpoint = Checkpoint(same_folder(comm, folder), comm)
    last = int(comm.rank == comm.size - 1)
    with pytest.raises(CheckpointError, match="s/a/b is the path of two arrays"):
        checkpoint.save(1, s={"a/b": np.ones(2), "a": {"b": np.zeros(2)}})
    if comm.size > 1:
        for step, objects, said in (
            (1 + last, {"x": 1}, r"rank \d has \(2, \['x'\]\) where rank 0 has \(1,"),
            (1, {f"x{last}": 1}, r"rank \d has \(1, \['x1'\]\) where"),
            (1, {"x": np.zeros(2 + last)}, r"x is .*\(3,\).* on a rank and .*\(2,\)"),
        ):
            with pytest.raises(CheckpointError, match=said):
                checkpoint.save(step, **objects)
    assert checkpoint.steps() == []
    checkpoint.save(1, x=1)


def states_are_not_mixed_up(comm, folder):
    folder = same_folder(comm, folder)
    checkpoint = Checkpoint(folder, comm)
    divided, whole = (counting_trainer(comm, zero, 0)[1:] for zero in (True, False))
    checkpoint.save(1, optimizer=divided[1])
    with pytest.raises(InvalidArgument, match="by the names of parameters, as that of a Zero"):
        checkpoint.load(optimizer=whole[1])
    checkpoint.save(2, optimizer=whole[1])
    with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: state is not one that a check"):
        checkpoint.load(optimizer=divided[1])


def the_manifest_is_json(comm, folder):
    folder = same_folder(comm, folder)
    path = Checkpoint(folder, comm).save(4, numbers=np.float32(2.5), half=np.ones(2, np.float16))
    body = (path / "manifest.json").read_text().split("\n", 1)[1]
    assert json.loads(body)["ranks"] == comm.size
    found = Checkpoint(folder, comm).load()
    assert found["numbers"] == 2.5 and isinstance(found["numbers"], np.float32)
    assert found["half"].dtype == np.float16


CASES = [
    a_checkpoint_before_the_first_step_does_not_fix_buckets,
    damage_is_found_on_every_rank,
    old_ones_are_removed,
    what_cannot_be_saved_is_named,
    unlike_things_are_refused_on_every_rank,
    states_are_not_mixed_up,
    the_manifest_is_json,
]

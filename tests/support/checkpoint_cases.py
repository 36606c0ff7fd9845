"""Checkpoints on any communicator, with any library."""

import hashlib
import json
import math
import os
import random
import re
import time
from pathlib import Path

import numpy as np
import pytest

from mpidist import Checkpoint, Pipeline, shard
from mpidist.checkpoint.format import Divided, Part
from mpidist.errors import CheckpointError, CommunicatorInUse, InvalidArgument
from mpidist.frameworks.base import find_dtype
from mpidist.nn import SGD, Adam, Linear, Module, ReLU, Sequential
from mpidist.parallel import DDP, ZeroOptimizer
from mpidist.schedule import blocks
from mpidist.topology import Grid
from tests.support.odd_arrays import odd_ndarrays
from tests.support.training_kits import HOOKS, KITS, SMALL, fingerprint, torch, train

if torch is not None:
    from tests.support.odd_arrays import Named, odd_tensors, waiting


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


def save_before_the_first_step(comm, folder):
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
        kept = model.framework.optimizer_state(optimizer.optimizer, piece.flat)
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


def damage_of_any_array_is_found(comm, folder):
    """Each rank checks some of the segments; small arrays are spread over the ranks."""
    folder = same_folder(comm, folder)
    checkpoint = Checkpoint(folder, comm)
    small = {f"a{k}": np.full(500, k + 0.5) for k in range(4)}
    path = checkpoint.save(1, large=np.arange(20_000.0), **small)
    _, body = (path / "manifest.json").read_text().split("\n", 1)
    segments = {name: found[2] for name, found in json.loads(body)["arrays"].items()}
    assert len({segments[name][0][0] for name in small}) == min(comm.size, len(small))
    assert len(segments["large"]) == comm.size
    for name, (file, offset, *_) in ((n, s) for n, found in segments.items() for s in found):
        whole = (path / file).read_bytes()
        comm.barrier()
        if comm.rank == 0:
            flipped = bytes([whole[offset] ^ 1])
            (path / file).write_bytes(whole[:offset] + flipped + whole[offset + 1 :])
        comm.barrier()
        with pytest.raises(CheckpointError, match=rf"{file} .*\b{name}\b.*\[1\]"):
            checkpoint.load()
        comm.barrier()
        if comm.rank == 0:
            (path / file).write_bytes(whole)
        comm.barrier()
    assert checkpoint.load()["large"][-1] == 19_999


def a_file_cut_after_the_check_is_an_error(comm, folder):
    """Neither numpy's error, nor the one element that is left in place of all."""
    folder = same_folder(comm, folder)

    class Reader:
        takes_parts = True

        def __init__(self, left):
            self.left = left

        def load_state_dict(self, state):
            comm.barrier()
            [segment] = state["x"].segments
            self.file = path / segment.file
            if comm.rank == 0 and self.left is None:
                self.file.unlink()
            elif comm.rank == 0:
                os.truncate(self.file, segment.offset + self.left)
            comm.barrier()
            state["x"].whole()

    for left, words in ((63, "63 of the 64"), (8, "8 of the 64"), (0, "0 of the 64"), (None, "No")):
        reader = Reader(left)
        whole = Checkpoint(folder / str(left), comm)
        path = whole.save(1, state={"x": np.arange(8.0)})
        with pytest.raises(CheckpointError, match=f"^rank {comm.rank}: load: .*{words}") as caught:
            whole.load(state=reader)
        assert str(reader.file) in str(caught.value)
        comm.barrier()


def records_are_refused(comm, folder):
    """Their fields would have no names after a load."""
    checkpoint = Checkpoint(same_folder(comm, folder), comm)
    for value in (np.zeros(3, [("a", "i4"), ("b", "f8")]), np.zeros((), [("a", "i4")])[()]):
        with pytest.raises(
            CheckpointError, match=r"state/0/x has dtype \[\('a', '<i4'\).*: save the f"
        ):
            checkpoint.save(1, state=[{"x": value}])
    assert checkpoint.steps() == []


def every_file_is_read_by_safetensors(comm, folder):
    """Name, dtype, shape and bits of every array, also where each rank has a slice of it."""
    import ml_dtypes
    import safetensors

    folder = same_folder(comm, folder)
    draw = np.random.default_rng(5)
    known = {"BOOL": "?", "BF16": ml_dtypes.bfloat16, "F8_E5M2": ml_dtypes.float8_e5m2}
    known |= {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu}
    known |= {f"{k.upper()}{8 * size}": f"{k}{size}" for k in "iu" for size in (1, 2, 4, 8)}
    known |= {"F16": "f2", "F32": "f4", "F64": "f8", "C64": "c8"}
    names = {np.dtype(dtype): name for name, dtype in known.items()}
    others = ["c16", "g", ">f4", "M8[s]", "S5", "U3", "V7", ml_dtypes.int4]
    state = {}
    for k, dtype in enumerate(map(np.dtype, [*known.values(), *others])):
        for shape in ((5, 3), (), (0, 4), (30000, 3)):
            count = math.prod(shape) * dtype.itemsize
            raw = draw.integers(0, 2, count).astype(np.uint8).tobytes()
            state[f"{k}/{shape}"] = np.frombuffer(raw, dtype).reshape(shape)
    cut = blocks(1000, comm.size)[comm.rank]
    flat = np.arange(1000, dtype=np.float32)
    part = Divided(all=Part(flat[cut], cut.start, (10, 100)))
    path = Checkpoint(folder, comm).save(1, state=state, part=part)

    [file] = [file for file in path.iterdir() if file.name == f"rank-{comm.rank:05d}.safetensors"]
    written = safetensors.deserialize(file.read_bytes())
    with safetensors.safe_open(file, "numpy") as opened:
        others = opened.metadata() or {}
        assert sorted(opened.keys()) == sorted(name for name, _ in written)
        for name, found in written:
            if not name.startswith("part") and found["dtype"] in ("F32", "I64", "BOOL", "C64"):
                array = opened.get_tensor(name)
                assert array.tobytes() == bytes(found["data"]) and [*array.shape] == found["shape"]
    everything = comm.allgather_object([(name, found, others.get(name)) for name, found in written])
    wanted = {"part/all": flat.reshape(10, 100), **{f"state/{k}": v for k, v in state.items()}}
    joined = dict.fromkeys(wanted, b"")
    for name, found, dtype in (entry for rank in everything for entry in rank):
        sliced = re.fullmatch(r"(.*)\[(\d+):(\d+)\]", name)
        key = sliced[1] if sliced else name
        array = wanted[key]
        start, stop = map(int, sliced.groups()[1:]) if sliced else (0, array.size)
        shape = [stop - start] if sliced else [*array.shape]
        assert (sliced is None) == (stop - start == array.size)
        if array.dtype in names:
            assert (found["dtype"], found["shape"], dtype) == (names[array.dtype], shape, None)
        else:
            shape = [*shape, array.itemsize]
            assert (found["dtype"], found["shape"]) == ("U8", shape)
            assert find_dtype(dtype) == array.dtype
        assert len(joined[key]) == start * array.itemsize  # ranks have ascending slices
        joined[key] += bytes(found["data"])
    assert joined == {key: array.tobytes() for key, array in wanted.items()}
    assert (file.stat().st_size - sum(len(found["data"]) for _, found in written)) % 8 == 0
    comm.barrier()


def names_of_arrays_in_a_file_are_unique(comm, folder):
    checkpoint = Checkpoint(same_folder(comm, folder), comm)
    with pytest.raises(CheckpointError, match="__metadata__ is the name of two .* rename a key"):
        checkpoint.save(1, __metadata__=np.ones(3))
    if comm.size == 1:
        pytest.skip("needs at least 2 ranks")
    half = blocks(90000, comm.size)[0].stop
    state = {"x": np.ones(90000), f"x[0:{half}]": np.ones(1)}
    # Arrays before it, until rank 0 writes the small array, as it writes this slice.
    state |= {f"a{k}": np.ones(1) for k in range(comm.size - 1)}
    with pytest.raises(CheckpointError, match=rf"on rank 0: .*x\[0:{half}\] is the name of two"):
        checkpoint.save(1, state=state)


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


def unlike_things_are_refused_on_every_rank(comm, folder):
    checkpoint = Checkpoint(same_folder(comm, folder), comm)
    last = int(comm.rank == comm.size - 1)
    with pytest.raises(CheckpointError, match=r"\bs/a/b\b"):
        checkpoint.save(1, s={"a/b": np.ones(2), "a": {"b": np.zeros(2)}})
    if comm.size > 1:
        for step, objects, said in (
            (1 + last, {"x": 1}, r"rank \d has \(2, \['x'\]\) where rank 0 has \(1,"),
            (1, {f"x{last}": 1}, r"rank \d has \(1, \['x1'\]\) where"),
            (1, {"x": np.zeros(2 + last)}, r"x is .*\(3,\) on rank \d and .*\(2,\) on rank 0"),
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
    with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: load: optimizer .*ZeroOptimizer"):
        checkpoint.load(optimizer=whole[1])
    checkpoint.save(2, optimizer=whole[1])
    with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: state .*ZeroOptimizer"):
        checkpoint.load(optimizer=divided[1])


def parameters(fill):
    """A state of arrays of several sizes, of which the largest is written by all ranks."""
    return {"weight": np.full(40000, fill, np.float32), "bias": np.full(7, fill), "on": {"k": fill}}


def states_that_differ_are_refused(comm, folder):
    """What is not the same on all ranks, and not declared: an error names the leaf and ranks."""
    if comm.size == 1:
        pytest.skip("needs at least 2 ranks")
    checkpoint, last = Checkpoint(same_folder(comm, folder), comm), comm.size - 1
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


def what_differs_is_saved_per_rank(comm, folder):
    """Declared, by name or in a mapping: each rank gets its own back."""
    folder = same_folder(comm, folder)
    model, order = Linear(40, 40, seed=comm.rank), shard(range(9), comm)
    wanted = model.weight.data.copy()
    for how in (("model", "state"), ["model", "state"], {"model", "state"}):
        Checkpoint(folder, comm).save(
            2, model=model, state=parameters(comm.rank), order=order, per_rank=how
        )
    mapping = {"model": model, "state": parameters(comm.rank)}
    Checkpoint(folder, comm).save(3, per_rank=mapping, order=order)
    Checkpoint(folder, comm).save(4, per_rank="state", state=parameters(comm.rank), order=order)
    for step in (2, 3):
        model.weight.data[:] = -1
        found = Checkpoint(folder, comm).load(step, model=model)
        np.testing.assert_array_equal(model.weight.data, wanted)
        np.testing.assert_array_equal(found["state"]["weight"], parameters(comm.rank)["weight"])
        assert found["state"]["on"] == {"k": comm.rank} and found["order"]["epoch"] == 0
    with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: per_rank=.*modle.*: .*model"):
        Checkpoint(folder, comm).save(5, per_rank=("modle",), model=model)
    with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: per_rank=.*: model "):
        Checkpoint(folder, comm).save(5, per_rank={"model": model}, model=model)
    if comm.size > 1:
        other = ("order",) if comm.rank else ()
        with pytest.raises(CheckpointError, match=r"save\(per_rank\): rank \d has"):
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


def random_states_are_per_rank(comm, folder):
    """Without being declared: each rank goes on with the numbers that it would have drawn."""
    checkpoint = Checkpoint(same_folder(comm, folder), comm)
    mine, again = sources(comm.rank), sources(99)
    drawn(mine)
    checkpoint.save(1, **mine)
    checkpoint.load(**again)
    wanted = drawn(mine)
    assert drawn(again) == wanted
    assert comm.size == 1 or comm.allgather_object(wanted)[0] != comm.allgather_object(wanted)[1]
    assert checkpoint.load()["generator"]["bit_generator"] == "PCG64"


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


def buffers_follow_the_policy_of_ddp(comm, folder):
    """Rank 0's for "broadcast", every rank's own for "keep"; "average" has equal ones, or fails."""
    checkpoint = Checkpoint(same_folder(comm, folder), comm)
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


def parts_must_make_up_the_whole(comm, folder):
    """Of what is divided: no slice twice, none missing."""
    checkpoint = Checkpoint(same_folder(comm, folder), comm)
    for start, count in ((0, 10), (10 * comm.rank, 9)):
        part = Part(np.arange(float(count)), start, (10 * comm.size,))
        if comm.size == 1 and count == 10:
            continue
        with pytest.raises(CheckpointError, match=r"\bx: .*parts on ranks? 0"):
            checkpoint.save(1, x=part)
    checkpoint.save(1, x=Part(np.arange(10.0) + comm.rank, 10 * comm.rank, (10 * comm.size,)))
    found = checkpoint.load()["x"].reshape(comm.size, 10)
    assert (found == np.arange(10.0) + np.arange(comm.size)[:, None]).all()


def divided_states_of_stages_are_kept_apart(comm, folder):
    """A grid: what replicas have in common is checked and saved by stage, ZeRO's slices too."""
    folder = same_folder(comm, folder)
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


def layers_of(kit, seed):
    """Twelve layers, of which every second has parameters."""
    if kit.name == "torch":
        torch.manual_seed(seed)
        return [torch.nn.Tanh() if k % 2 else torch.nn.Linear(6, 6) for k in range(12)]
    source = np.random.default_rng(seed)
    return [ReLU() if k % 2 else Linear(6, 6, seed=source) for k in range(12)]


def staged(comm, kit, layers, chunks=1, **options):
    """A pipeline of the layers, one after another, with as many chunks on each rank."""
    count = comm.size * chunks
    kind = torch.nn.Sequential if kit.name == "torch" else Sequential
    cuts = [len(layers) * k // count for k in range(count + 1)]
    stages = [kind(*layers[a:b]) for a, b in zip(cuts, cuts[1:])]
    mine = [stages[comm.rank + k * comm.size] for k in range(chunks)]
    if options.pop("names", False):  # which makes of it something else than layers in a row
        mine = [type("Own", (kind,), {})(*stage.layers) for stage in mine]
    schedule = "interleaved" if chunks > 1 else "1f1b"
    return Pipeline(mine if chunks > 1 else mine[0], comm, comm.size, schedule, **options)


def bits_of(comm, kit, layers, pipe):
    """The parameters of all layers, each from the rank that holds it."""
    held = {id(p) for m in pipe._numbered().values() for p in m.parameters()}
    mine = {}
    for k, layer in enumerate(layers):
        values = [np.array(kit.values(layer)[i]).tobytes() for i in range(2 - 2 * (k % 2))]
        if any(id(p) in held for p in layer.parameters()):
            mine[k] = values
    return merged(comm.allgather_object(mine))


def write_pipeline(comm, kit, folder):
    layers = layers_of(kit, comm.rank)
    pipe = staged(comm, kit, layers)
    optimizer = {"moments": np.full(3, comm.rank)}
    Checkpoint(folder, comm).save(1, pipe=pipe, per_rank={"optimizer": optimizer})
    return bits_of(comm, kit, layers, pipe)


def read_pipeline(comm, kit, folder, chunks=1):
    layers = layers_of(kit, 99)
    pipe = staged(comm, kit, layers, chunks)
    Checkpoint(folder, comm).load(pipe=pipe, skip=["optimizer"])
    return bits_of(comm, kit, layers, pipe)


def read_as_something_else(comm, kit, folder, stages):
    """What is not layers in a row cannot be dealt anew: it says what was saved, and is here."""
    layers = layers_of(kit, 99)
    pipe, checkpoint = staged(comm, kit, layers, names=True), Checkpoint(folder, comm)
    said = rf"rank {comm.rank}: .*\b{stages} stages .*\blayers\b"
    with pytest.raises(InvalidArgument, match=said):
        checkpoint.load(pipe=pipe, skip=["optimizer"])
    shorter = staged(comm, kit, layers[:-1])
    with pytest.raises(InvalidArgument, match=said):
        checkpoint.load(pipe=shorter, skip=["optimizer"])
    with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: .*state .*Pipeline"):
        pipe.load_state_dict({})
    said = rf"optimizer .*per rank, .*\b{stages} ranks.*\b{comm.size}\b"
    with pytest.raises(CheckpointError, match=said):
        checkpoint.load(pipe=shorter)


def a_pipeline_is_saved_by_stage(comm, folder):
    """Each rank has stages of its own, of equal shapes."""
    if comm.size == 1:
        pytest.skip("needs at least 2 ranks")
    folder = same_folder(comm, folder)
    for kit in (param.values[0] for param in KITS):
        if kit.name == "torch" and torch is None:
            continue
        where = folder / kit.name
        wanted = write_pipeline(comm, kit, where)
        assert len(wanted) == 6
        assert read_pipeline(comm, kit, where) == wanted
        assert read_pipeline(comm, kit, where, chunks=2) == wanted
        found = Checkpoint(where, comm).load()
        assert (found["optimizer"]["moments"] == comm.rank).all()
        assert len(found["pipe"]["by_stage"]) == comm.size
        layers, others = layers_of(kit, comm.rank), layers_of(kit, 99)
        own = staged(comm, kit, layers).state_dict()
        staged(comm, kit, others).load_state_dict(own)
        first = 12 * comm.rank // comm.size
        first += first % 2  # a layer with parameters
        values = [kit.values(part[first]) for part in (layers, others)]
        np.testing.assert_array_equal(*(np.array(each[0]) for each in values))
        said = rf"rank {comm.rank}: .* of {comm.size}, without \["
        with pytest.raises(InvalidArgument, match=said):
            staged(comm, kit, others, chunks=2).load_state_dict(own)


def replicas_of_stages(comm, folder):
    """On a grid each stage is saved once; it loads into stages without a DDP as well."""
    if comm.size % 2:
        pytest.skip("needs an even number of ranks")
    folder, kit = same_folder(comm, folder), KITS[0].values[0]
    if comm.size == 2:
        pytest.skip("needs at least 4 ranks")
    grid = Grid(comm, pipe=2)
    stage = Sequential(*layers_of(kit, grid.pipe_index)[:6])
    model = DDP(stage, grid.data, overlap="none")
    pipe = Pipeline(model, grid.pipe, 2)
    Checkpoint(folder, grid).save(1, pipe=pipe)
    bare = Sequential(*layers_of(kit, 99)[:6])
    other = Pipeline(bare, grid.pipe, 2)
    for again in (other, pipe):
        Checkpoint(folder, grid).load(pipe=again)
    for mine, saved in zip(bare.parameters(), stage.parameters(), strict=True):
        np.testing.assert_array_equal(mine.data, saved.data)
    stage.parameters()[0].data[0, 0] += grid.data_index
    with pytest.raises(CheckpointError, match=r"pipe/by_stage/\d/state/module/0\.weight .*rank"):
        Checkpoint(folder, grid).save(2, pipe=pipe)


def another_format_is_refused(comm, folder):
    """And a manifest of this format that lacks a field is damaged."""
    folder = same_folder(comm, folder)
    checkpoint = Checkpoint(folder, comm)
    path = checkpoint.save(4, state=parameters(3))
    body = json.loads((path / "manifest.json").read_text().split("\n", 1)[1])
    assert body.pop("divided") == {}
    for changed, fact in (({**body, "format": 1}, "format 1: .*reads 2"), (body, "divided")):
        comm.barrier()
        if comm.rank == 0:
            text = json.dumps(changed)
            digest = hashlib.sha256(text.encode()).hexdigest()
            (path / "manifest.json").write_text(f"{digest}\n{text}\n")
        comm.barrier()
        with pytest.raises(CheckpointError, match=fact):
            checkpoint.load()


def incomplete_data_is_an_error(comm, folder):
    """A manifest that is intact, and lacks a segment of an array, or has one twice."""
    folder = same_folder(comm, folder)
    checkpoint = Checkpoint(folder, comm)
    path = checkpoint.save(4, state=parameters(3))
    comm.barrier()
    kept = (path / "manifest.json").read_text()
    comm.barrier()
    for what in ("lacks one", "overlaps"):
        if comm.rank == 0:
            body = json.loads(kept.split("\n", 1)[1])
            segments = body["arrays"]["state/weight"][2]
            if what == "lacks one":
                segments.pop()
            else:
                segments.append(segments[-1])
            text = json.dumps(body)
            digest = hashlib.sha256(text.encode()).hexdigest()
            (path / "manifest.json").write_text(f"{digest}\n{text}\n")
        comm.barrier()
        with pytest.raises(CheckpointError, match=r"state/weight.*(expected 40000|from \d+ on)"):
            checkpoint.load()
        comm.barrier()


def arrays_that_are_not_their_memory_are_refused(comm, folder):
    """By path; a mask was dropped without a word.  What has one meaning is saved."""
    checkpoint = Checkpoint(same_folder(comm, folder), comm)
    odd = odd_ndarrays(4) + ([] if torch is None else odd_tensors(4))
    for k, (x, word, *_) in enumerate(odd):
        with pytest.raises(CheckpointError, match=r"state/w/0 is .*") as caught:
            checkpoint.save(k, state={"w": [x]})
        assert word in str(caught.value)
    assert checkpoint.steps() == []
    plain = {"matrix": np.ones((2, 2)).view(np.matrix)}
    if torch is not None:
        one = torch.arange(4.0)
        plain |= {"waiting": waiting(one), "parameter": torch.nn.Parameter(one)}
        plain |= {"named": one.as_subclass(Named)}
    checkpoint.save(1, state=plain)
    for name, x in checkpoint.load()["state"].items():
        assert x.tolist() == plain[name].tolist(), name


def the_manifest_is_json(comm, folder):
    folder = same_folder(comm, folder)
    path = Checkpoint(folder, comm).save(4, numbers=np.float32(2.5), half=np.ones(2, np.float16))
    body = (path / "manifest.json").read_text().split("\n", 1)[1]
    assert json.loads(body)["ranks"] == comm.size
    found = Checkpoint(folder, comm).load()
    assert found["numbers"] == 2.5 and isinstance(found["numbers"], np.float32)
    assert found["half"].dtype == np.float16


class Faulty:
    """Saves and loads two arrays; before, it does something in one of both."""

    def __init__(self, where, act):
        self.where, self.act = where, act

    def state_dict(self):
        if self.where == "save":
            self.act()
        return {"w": np.ones(30_000)}

    def load_state_dict(self, _):
        if self.where == "load":
            self.act()


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


def errors_of_one_rank_are_known_on_all(comm, folder):
    """Soon, as CheckpointError, whatever they are; and the communicator stays in step."""
    checkpoint, last = Checkpoint(same_folder(comm, folder), comm), comm.rank == comm.size - 1
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


MEETINGS = ("raises before", "calls one more")


def a_collective_of_some_states_is_an_error_on_all(comm, folder, meets, where):
    """The collective meets one of the checkpoint, which all ranks repeat to tell the error."""
    last = comm.rank == comm.size - 1

    def act():
        if last and meets == "raises before":
            raise RuntimeError("early")
        if last or meets == "raises before":
            comm.allreduce(np.ones(50_000))

    checkpoint = Checkpoint(same_folder(comm, folder), comm)
    checkpoint.save(0, model=Faulty("", None))
    model, begun = Faulty(where, act), time.monotonic()
    if comm.size == 1:
        pytest.skip("needs at least 2 ranks")
    words = "RuntimeError: early" if meets == "raises before" else "CollectiveMismatch"
    with pytest.raises(CheckpointError, match=words):
        checkpoint.save(1, model=model) if where == "save" else checkpoint.load(model=model)
    assert time.monotonic() - begun < 10
    assert comm.allreduce(1) == comm.size


CASES = [
    errors_of_one_rank_are_known_on_all,
    arrays_that_are_not_their_memory_are_refused,
    save_before_the_first_step,
    damage_is_found_on_every_rank,
    damage_of_any_array_is_found,
    a_file_cut_after_the_check_is_an_error,
    records_are_refused,
    every_file_is_read_by_safetensors,
    names_of_arrays_in_a_file_are_unique,
    old_ones_are_removed,
    what_cannot_be_saved_is_named,
    unlike_things_are_refused_on_every_rank,
    states_are_not_mixed_up,
    the_manifest_is_json,
    states_that_differ_are_refused,
    what_differs_is_saved_per_rank,
    random_states_are_per_rank,
    buffers_follow_the_policy_of_ddp,
    parts_must_make_up_the_whole,
    divided_states_of_stages_are_kept_apart,
    a_pipeline_is_saved_by_stage,
    replicas_of_stages,
    another_format_is_refused,
    incomplete_data_is_an_error,
]

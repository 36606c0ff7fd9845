"""The files of a checkpoint: manifest, checksums, segments; damage, and what is no format."""

import hashlib
import json
import math
import os
import re

import numpy as np
import pytest

from mpidist import Checkpoint, run_simulated
from mpidist.checkpoint.format import Divided, Part
from mpidist.errors import CheckpointError
from mpidist.frameworks.base import find_dtype
from mpidist.schedule import blocks
from tests.support.odd_arrays import odd_ndarrays
from tests.support.training_kits import torch

if torch is not None:
    from tests.support.odd_arrays import Named, odd_tensors, waiting


pytestmark = pytest.mark.ranks(1, 3, 4)
STATE = {"weight": np.full(40000, 3, np.float32), "bias": np.full(7, 3.0)}


def test_load_finds_damage_of_any_array(comm, folder):
    """Each rank checks some of the segments; small arrays are spread over the ranks."""
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


def test_read_of_a_file_cut_after_the_check_is_an_error(comm, folder):
    """Neither numpy's error, nor the one element that is left in place of all."""

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


def test_save_of_records_is_refused(comm, folder):
    """Their fields would have no names after a load."""
    checkpoint = Checkpoint(folder, comm)
    for value in (np.zeros(3, [("a", "i4"), ("b", "f8")]), np.zeros((), [("a", "i4")])[()]):
        with pytest.raises(
            CheckpointError, match=r"state/0/x has dtype \[\('a', '<i4'\).*: save the f"
        ):
            checkpoint.save(1, state=[{"x": value}])
    assert checkpoint.steps() == []


def test_files_are_read_by_safetensors(comm, folder):
    """Name, dtype, shape and bits of every array, also where each rank has a slice of it."""
    import ml_dtypes
    import safetensors

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


def test_names_of_arrays_in_a_file_are_unique(comm, folder):
    checkpoint = Checkpoint(folder, comm)
    with pytest.raises(CheckpointError, match="__metadata__ is the name of two .* rename a key"):
        checkpoint.save(1, __metadata__=np.ones(3))
    if comm.size > 1:
        half = blocks(90000, comm.size)[0].stop
        state = {"x": np.ones(90000), f"x[0:{half}]": np.ones(1)}
        # Arrays before it, until rank 0 writes the small array, as it writes this slice.
        state |= {f"a{k}": np.ones(1) for k in range(comm.size - 1)}
        with pytest.raises(
            CheckpointError, match=rf"on rank 0: .*x\[0:{half}\] is the name of two"
        ):
            checkpoint.save(1, state=state)


def test_parts_must_make_up_the_whole(comm, folder):
    """Of what is divided: no slice twice, none missing."""
    checkpoint = Checkpoint(folder, comm)
    for start, count in ((0, 10), (10 * comm.rank, 9)):
        part = Part(np.arange(float(count)), start, (10 * comm.size,))
        if comm.size == 1 and count == 10:
            continue
        with pytest.raises(CheckpointError, match=r"\bx: .*parts on ranks? 0"):
            checkpoint.save(1, x=part)
    checkpoint.save(1, x=Part(np.arange(10.0) + comm.rank, 10 * comm.rank, (10 * comm.size,)))
    found = checkpoint.load()["x"].reshape(comm.size, 10)
    assert (found == np.arange(10.0) + np.arange(comm.size)[:, None]).all()


def test_manifest_of_another_format_is_refused(comm, folder):
    """And a manifest of this format that lacks a field is damaged."""
    checkpoint = Checkpoint(folder, comm)
    path = checkpoint.save(4, state=STATE)
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


def test_manifest_without_a_segment_is_refused(comm, folder):
    """A manifest that is intact, and lacks a segment of an array, or has one twice."""
    checkpoint = Checkpoint(folder, comm)
    path = checkpoint.save(4, state=STATE)
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


def test_manifest_is_json(comm, folder):
    path = Checkpoint(folder, comm).save(4, numbers=np.float32(2.5), half=np.ones(2, np.float16))
    body = (path / "manifest.json").read_text().split("\n", 1)[1]
    assert json.loads(body)["ranks"] == comm.size
    found = Checkpoint(folder, comm).load()
    assert found["numbers"] == 2.5 and isinstance(found["numbers"], np.float32)
    assert found["half"].dtype == np.float16


def test_arrays_that_are_not_their_memory_are_refused(comm, folder):
    """By path; a mask was dropped without a word.  What has one meaning is saved."""
    checkpoint = Checkpoint(folder, comm)
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


@pytest.mark.parametrize("make", (lambda v: [v], lambda v: {"k": v}), ids=("list", "dict"))
def test_save_of_a_state_nested_too_deep_is_refused(make, tmp_path):
    """What can be saved can be loaded."""

    def nested(depth):
        value = 1
        for _ in range(depth):
            value = make(value)
        return value

    def act(comm):
        checkpoint = Checkpoint(tmp_path, comm)
        checkpoint.save(1, v=nested(50))
        assert checkpoint.load()["v"] == nested(50)
        for depth in (60, 300, 2000):
            with pytest.raises(CheckpointError, match=r"v/.* is nested more than 50"):
                checkpoint.save(2, v=nested(depth))

    run_simulated(2, act)


def rewrite(file, change):
    """Change a manifest, and give it the right checksum."""
    content = json.loads(file.read_bytes().split(b"\n", 1)[1])
    changed = change(content)
    content = content if changed is None else changed
    body = json.dumps(content).encode()
    file.write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body + b"\n")


def loads_or_is_refused(folder, file, change):
    """Load a forged checkpoint on two ranks: equal values, or CheckpointError on both."""
    kept = file.read_bytes()
    rewrite(file, change)

    def load(comm):
        comm.timeout = 20
        try:
            with np.printoptions(threshold=10**9):
                return str(Checkpoint(folder, comm).load())
        except CheckpointError:
            return "refused"

    found = run_simulated(2, load)
    file.write_bytes(kept)
    assert len(set(found)) == 1
    return found[0]


def test_forged_manifests_are_refused(tmp_path):
    """These manifests were believed once; tests/test_foreign.py forges thousands by chance."""
    state = {"w": np.arange(20_000, dtype="f4"), "n": [1, (2.5, "x")], "s": np.float32(3)}
    path = run_simulated(2, lambda c: Checkpoint(tmp_path, c).save(7, state=state, n=3))[0]
    file, secret = path / "manifest.json", tmp_path / "secret"
    secret.write_text("x" * 100)
    os.mkfifo(path / "rank-00009.safetensors")
    os.symlink(secret, path / "rank-00008.safetensors")
    content = json.loads(file.read_bytes().split(b"\n", 1)[1])
    first, digest = content["arrays"]["state/w"][2][0], hashlib.sha256(b"").hexdigest()

    def segments(*new):
        return lambda tree: tree["arrays"]["state/w"].__setitem__(2, [list(s) for s in new])

    def steal(tree):
        tree["arrays"]["state/w"] = ["S0", [17], [[str(secret), 0, 0, 17, digest]]]

    must_fail = [
        steal,
        segments(first, first),
        segments(["rank-00009.safetensors", *first[1:]]),
        segments(["rank-00008.safetensors", *first[1:]]),
        segments(["../secret", *first[1:]]),
        segments([first[0], "0", *first[2:]]),
        lambda tree: [],
    ]
    for change in must_fail:
        assert loads_or_is_refused(tmp_path, file, change) == "refused"
    assert loads_or_is_refused(tmp_path, file, lambda tree: None) != "refused"

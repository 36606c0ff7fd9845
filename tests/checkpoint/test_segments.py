"""Arrays in safetensors files: which rank writes what, checksums, and damage."""

import json
import math
import os
import re

import numpy as np
import pytest

from mpidist import Checkpoint
from mpidist.checkpoint.state import Divided, Part
from mpidist.errors import CheckpointError
from mpidist.frameworks.base import find_dtype
from mpidist.schedule import blocks

pytestmark = pytest.mark.ranks(1, 3, 4)


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

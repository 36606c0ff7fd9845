"""Checkpoints on simulated ranks; and what a kill leaves."""

import hashlib
import json
import os
import pickle
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from mpidist import Checkpoint, CheckpointError, CollectiveConfig, run_simulated
from mpidist.checkpoint import checkpoint
from mpidist.frameworks.base import dtype_name
from tests.support import checkpoint_cases as cases
from tests.support.processes import environment, run
from tests.support.training_kits import KITS

JOB = Path(__file__).with_name("killed_job.py")


@pytest.mark.parametrize("size", (1, 3, 4))
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.__name__)
def test_checkpoint(case, size, tmp_path):
    run_simulated(size, lambda comm: case(comm, tmp_path))


@pytest.mark.parametrize("zero", (False, True), ids=("whole", "zero"))
@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("size", (1, 2, 3))
def test_a_resumed_run_has_the_same_bits(kit, size, zero, tmp_path):
    run_simulated(
        size,
        lambda comm: cases.a_resumed_run_has_the_same_bits(comm, kit, tmp_path, "adam", zero),
    )


@pytest.mark.parametrize("zero", (False, True), ids=("whole", "zero"))
@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("optimizer", ("momentum", "adam"))
def test_other_numbers_of_ranks(kit, optimizer, zero, tmp_path):
    """Model and optimizer have the same bits on any number of ranks."""
    for before, after in ((3, 2), (2, 1), (1, 4)):
        folder = tmp_path / f"{before}-{after}"
        saved = run_simulated(
            before, lambda c, f=folder: cases.write_for_others(c, kit, f, optimizer, zero)
        )
        found = run_simulated(
            after, lambda c, f=folder: cases.read_from_others(c, kit, f, optimizer, zero)
        )
        assert len(set(map(str, [*saved, *found]))) == 1


@pytest.mark.parametrize("before, after", ((3, 2), (1, 2), (2, 1)))
def test_per_rank_states_on_other_sizes(before, after, tmp_path):
    run_simulated(before, lambda comm: cases.write_per_rank(comm, tmp_path))
    run_simulated(after, lambda comm: cases.read_per_rank(comm, tmp_path, before))


@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("before, after, chunks", ((3, 2, 1), (2, 3, 2), (4, 2, 2)))
def test_a_pipeline_on_other_numbers_of_stages(kit, before, after, chunks, tmp_path):
    """The layers are dealt anew: the whole model has the bits that it had."""
    saved = run_simulated(before, lambda comm: cases.write_pipeline(comm, kit, tmp_path))
    found = run_simulated(after, lambda comm: cases.read_pipeline(comm, kit, tmp_path, chunks))
    assert len({repr(sorted(bits.items())) for bits in (*saved, *found)}) == 1


def test_a_pipeline_that_cannot_be_dealt_anew(tmp_path):
    kit = KITS[0].values[0]
    run_simulated(3, lambda comm: cases.write_pipeline(comm, kit, tmp_path))
    run_simulated(2, lambda comm: cases.read_as_something_else(comm, kit, tmp_path, 3))


@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("name", cases.HOOKS)
def test_what_hooks_left_out(kit, name, tmp_path):
    run_simulated(3, lambda comm: cases.what_hooks_left_out_is_resumed(comm, kit, tmp_path, name))


@pytest.mark.parametrize("before, after", ((4, 2), (2, 3), (3, 1)))
@pytest.mark.parametrize("name", ("top-k", "powersgd"))
def test_hook_state_on_other_numbers_of_ranks(name, before, after, tmp_path):
    kit = KITS[0].values[0]
    saved = run_simulated(before, lambda c: cases.write_with_hook(c, kit, tmp_path, name))
    loaded = run_simulated(after, lambda c: cases.read_with_hook(c, kit, tmp_path, name, before))
    assert len({*saved, *loaded}) == 1


@pytest.mark.parametrize("order", (("model", "optimizer"), ("optimizer", "model")), ids="-".join)
@pytest.mark.parametrize("zero", (False, True), ids=("whole", "zero"))
def test_other_settings_change_no_bits(zero, order, tmp_path):
    """Buckets and algorithms are those of the run that saved, though another was asked for now."""
    kit, before = KITS[0].values[0], {**cases.SMALL, "algorithm": "ring"}
    saved = run_simulated(
        5,
        lambda c: cases.write_with_settings(c, kit, tmp_path, zero, **before),
        config=CollectiveConfig(local_allreduce="ring"),
    )
    found = run_simulated(
        5,
        lambda c: cases.read_with_settings(c, kit, tmp_path, zero, order, algorithm="linear"),
        config=CollectiveConfig(local_allreduce="linear"),
    )
    assert found == saved
    assert saved[0][1][0]["buffers"] == {"float32": "ring"}


@pytest.mark.long
def test_killed_at_any_moment(tmp_path):
    """Every call to the file system is the last one once; what was complete is whole."""
    moment, killed = 0, True
    while killed:
        folder = tmp_path / str(moment)
        done = run(
            [sys.executable, str(JOB), str(folder), str(moment)],
            60.0,
            environment(PYTHONPATH=str(JOB.parents[2])),
        )
        killed = done.status == -signal.SIGKILL
        assert killed or done.status == 0, done.output
        complete = [int(line.split()[1]) for line in done.output.splitlines() if "saved" in line]

        def check(comm, folder=folder, complete=complete):
            found = Checkpoint(folder, comm).load()
            step = 0 if found is None else found["step"]
            assert step in (max(complete, default=0), max(complete, default=0) + 1)
            assert found is None or (found["data"] == step).all()
            Checkpoint(folder, comm).save(step + 1, data=found)  # and it goes on

        run_simulated(2, check)
        moment += 1
    assert moment > 12


def test_name_of_an_unpickled_dtype():
    """A dtype that was unpickled does not count as built in."""
    for dtype in ("complex128", "float32", "int8"):
        there = pickle.loads(pickle.dumps(np.dtype(dtype)))
        assert dtype_name(there) == dtype_name(np.dtype(dtype)) == np.dtype(dtype).str


@pytest.mark.parametrize("make", (lambda v: [v], lambda v: {"k": v}), ids=("list", "dict"))
def test_a_state_nested_too_deep_is_refused_at_save(make, tmp_path):
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


def test_forged_checkpoints_are_refused(tmp_path):
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


def test_an_error_in_comparing_is_known_on_all(tmp_path, monkeypatch):
    """Rank 0 alone compares the states, which takes the memory of all of them."""

    def compare(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(checkpoint, "_compare", compare)

    def act(comm):
        with pytest.raises(CheckpointError, match="on rank 0: MemoryError: no room"):
            Checkpoint(tmp_path, comm).save(1, w=1)

    run_simulated(3, act)

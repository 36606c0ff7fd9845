"""The manifest: what is in it, and what is refused."""

import hashlib
import json
import os

import numpy as np
import pytest

from mpidist import Checkpoint, run_simulated
from mpidist.errors import CheckpointError

pytestmark = pytest.mark.ranks(1, 3, 4)

STATE = {"weight": np.full(40000, 3, np.float32), "bias": np.full(7, 3.0)}


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

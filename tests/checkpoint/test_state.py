"""What a state may be, and the markers of what differs between ranks."""

import numpy as np
import pytest

from mpidist import Checkpoint
from mpidist.checkpoint.state import Part, is_zero_state, read_all, state_of
from mpidist.errors import CheckpointError

pytestmark = pytest.mark.ranks(1, 3, 4)


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


@pytest.mark.ranks(1)
def test_state_of_prefers_the_one_for_checkpoints():
    class Model:
        def state_dict(self):
            return {"w": 1}

    class Wrapped(Model):
        def checkpoint_state(self):
            return {"parts": 2}

    assert [state_of(x) for x in (Model(), Wrapped(), 3)] == [{"w": 1}, {"parts": 2}, 3]


@pytest.mark.ranks(1)
def test_is_zero_state_by_its_keys():
    assert is_zero_state({"state": {}, "options": {}})
    assert is_zero_state({"state": {}, "options": {}, "sending": {}})
    for other in ({"state": {}}, {"state": {}, "options": {}, "lr": 1}, ["state", "options"], None):
        assert not is_zero_state(other)


@pytest.mark.ranks(1)
def test_read_all_reads_what_was_left_in_the_files():
    class Lazy:
        def whole(self):
            return "read"

    given = {"a": [Lazy(), (1, Lazy())], "b": "text"}
    assert read_all(given) == {"a": ["read", (1, "read")], "b": "text"}

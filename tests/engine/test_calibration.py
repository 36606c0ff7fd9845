"""When the ranks calibrate, and who is missed."""

import numpy as np
import pytest

from mpidist import run_simulated
from mpidist.errors import DeadlockError


@pytest.mark.parametrize("size", [2, 4])
def test_simulated_ranks_calibrate_when_asked(size):
    def both(comm):
        before = comm.explain("allreduce", 1 << 20)[0].why
        total = comm.allreduce(np.ones(1 << 18, "float32"))
        after = comm.explain("allreduce", 1 << 20)[0].why
        inherited = comm.split(0).explain("allreduce", 1 << 20)[0].why
        return before, after, inherited, total.sum()

    found = run_simulated(size, both, calibrate=True)
    assert len(set(found)) == 1, "every rank has the same figures"
    before, after, inherited, total = found[0]
    assert "the first call will calibrate" in before and total == size << 18
    assert after.startswith("cost model: ") and inherited == after
    before, after, _, _ = run_simulated(size, both)[0]
    assert before == after == "shipped rule: ring from 32 KiB on"


def test_background_call_does_not_calibrate():
    """Its ranks need not meet: this one would wait for a message that comes later."""

    def cross(comm):
        data = np.ones(4, "float32")
        if comm.rank == 0:
            work = comm.iallreduce(data)
            comm.send(data, 1)
        else:
            comm.recv(data, 0)
            work = comm.iallreduce(data)
        return work.wait()[0]

    assert run_simulated(2, cross, calibrate=True, timeout=10) == [2.0, 2.0]


def test_missing_rank_in_calibrate():
    def absent(comm):
        if comm.rank == 0:
            with pytest.raises(DeadlockError) as caught:
                comm.allreduce(np.ones(2))
            assert "allreduce" in comm.broken and "calibrate" not in comm.broken
            raise caught.value

    with pytest.raises(DeadlockError, match="ranks 0 wait"):
        run_simulated(2, absent, calibrate=True)

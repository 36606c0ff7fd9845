"""A message from a rank whose program has ended is not waited for until the deadline."""

import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.processes import environment, mpiexec, run

ROOT = str(Path(__file__).resolve().parents[2])

WAITS = {
    "recv": lambda c: c.recv(np.ones(3), 0),
    "from any": lambda c: c.recv(np.ones(3), None),
    "recv_object": lambda c: c.recv_object(0),
    "irecv": lambda c: c.irecv(np.ones(3), 0).wait(),
    "posted": lambda c: c.wait_all([c.post_recv(np.ones(3), 0)]),
    "create_group": lambda c: c.create_group([0, 1]),
}


@pytest.mark.long
@pytest.mark.parametrize("how", WAITS)
def test_the_rank_that_has_left_is_named(tmp_path, how):
    done = run(mpiexec(2, __file__, how), 100, environment(PYTHONPATH=ROOT), tmp_path)
    said = [line for line in done.output.splitlines() if line.startswith("after")]
    assert len(said) == 1, done.output
    _, seconds, kind, text = said[0].split(maxsplit=3)
    assert kind == "RankFailed" and "rank 0" in text and "has left" in text
    assert float(seconds) < 60, "it waited for the deadline, which is 600 s"


def test_what_it_sent_before_arrives(tmp_path):
    done = run(mpiexec(2, __file__, "sent"), 100, environment(PYTHONPATH=ROOT), tmp_path)
    assert "got 7.0 and 8.0" in done.output, done.output


if __name__ == "__main__":
    import mpidist

    comm, how = mpidist.init(timeout=600), sys.argv[1]
    comm.barrier()
    if comm.rank == 0:
        if how == "sent":
            comm.isend(np.full(10, 7.0), 1)
            comm.isend(np.full(1_000_000, 8.0), 1, 1)
        sys.exit()
    while not comm.backend.board.has_left(0):
        time.sleep(0.01)
    if how == "sent":
        time.sleep(2)
        small, large = np.empty(10), np.empty(1_000_000)
        comm.recv(small, 0)
        comm.recv(large, 0, 1)
        print("got", small[9], "and", large[-1], flush=True)
        sys.exit()
    begin = time.monotonic()
    try:
        WAITS[how](comm)
    except Exception as error:
        took = time.monotonic() - begin
        print("after", f"{took:.1f}", type(error).__name__, error, flush=True)
    comm.backend.abort(1)

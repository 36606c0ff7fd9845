"""Hand-written algorithms send point-to-point messages, as many as was proved, and nothing else."""

import numpy as np
import pytest

from mpidist import Communicator
from mpidist.backends.tags import GREETING
from mpidist.errors import Unsupported
from mpidist.schedule import algorithms, prove
from tests.support import collectives as cases


class Refuses:
    """Instead of the native collectives: none may be called, but for the barrier before freeing."""

    def why_not(self, call):
        return "none may be called here"

    def __getattr__(self, name):
        raise AssertionError(f"native.{name} was used")


class Counting:
    """A bound round that counts what it sends each time it is started."""

    def __init__(self, transfer, messages, sent):
        self.transfer, self.sent = transfer, sent
        sent = [m for m in messages if not m.incoming and m.tag != GREETING]
        self.targets = [(m.peer, m.data.nbytes) for m in sent]
        self.test = transfer.test

    def start(self):
        self.sent += self.targets
        self.transfer.start()


@pytest.fixture
def counted(comm, monkeypatch):
    """A communicator that notes (peer, bytes) of every message, bound or not."""
    made = Communicator(comm.backend.split(0, comm.rank))
    backend, made.sent = made.backend, []
    isend, bind = backend.isend, backend.bind

    def counted_isend(data, peer, tag):
        if tag != GREETING:  # between nodes the first message names the call
            made.sent.append((peer, data.nbytes))
        return isend(data, peer, tag)

    monkeypatch.setattr(backend, "isend", counted_isend)
    monkeypatch.setattr(backend, "bind", lambda m: Counting(bind(m), m, made.sent))
    monkeypatch.setattr(backend, "native", Refuses())
    yield made
    monkeypatch.undo()
    made.free()


def arrays(comm, collective, n, root):
    """The arrays of a call, x and out, whose whole buffer has `n` elements."""
    p, each = comm.size, n // comm.size
    at_root = comm.rank == root
    x, out = {
        "allreduce": (n, n),
        "reduce": (n, n if at_root else None),
        "broadcast": (n, n),
        "allgather": (each, n),
        "gather": (each, n if at_root else None),
        "reduce_scatter": (n, each),
        "scatter": (n if at_root else None, each),
        "alltoall": (n, n),
        "scan": (n, n),
        "exscan": (n, n),
        "barrier": (None, None),
    }[collective]
    assert n % p == 0
    return [None if size is None else np.ones(size) for size in (x, out)]


@pytest.mark.parametrize("algorithm", algorithms(), ids=lambda a: a.label.replace(" ", "-"))
def test_messages(counted, algorithm):
    comm, collective = counted, algorithm.collective
    groups, p = comm.topology.groups, comm.size
    if algorithm.unsupported(p, groups=groups) is not None:
        with pytest.raises(Unsupported, match=f"{collective} '{algorithm.name}'"):
            getattr(comm, collective)(*arrays(comm, collective, p, 0)[:1], algorithm=algorithm.name)
        assert not comm.sent
        return
    for root in range(p) if "root" in algorithm.uses else (0,):
        proof = prove(collective, algorithm, p, root, groups=groups)
        n = p * proof.block_count
        x, out = arrays(comm, collective, n, root)
        arguments = {} if collective == "barrier" else {"x": x, "out": out}
        arguments |= {"root": root} if collective in cases.ROOTED else {}
        each = 0 if collective == "barrier" else n // proof.block_count * 8
        for turn in range(3):  # posted one by one, then persistent, then without checks
            comm.sent.clear()
            getattr(comm, collective)(algorithm=algorithm.name, **arguments)
            assert len(comm.sent) == proof.sent[comm.rank], (root, turn)
            assert sum(b for _, b in comm.sent) == proof.blocks_sent[comm.rank] * each
        x, out = arrays(comm, collective, 0, root)
        if collective != "barrier":
            comm.sent.clear()
            arguments |= {"x": x, "out": out}
            getattr(comm, collective)(algorithm=algorithm.name, **arguments)
            assert {b for _, b in comm.sent} <= {0}  # messages without data, no surprises
            assert len(comm.sent) == proof.sent[comm.rank]


@pytest.mark.parametrize("name", ["binomial", "linear", "tree"])
def test_segments_are_messages(comm, name):
    """Each segment is a message to each of p - 1 ranks: 8,072 bytes are 11 of up to 800."""
    sub = Communicator(comm.backend.split(0, comm.rank), segment_bytes=800, window=2)
    sent = []
    isend = sub.backend.isend

    def counted(data, peer, tag):
        if tag != GREETING:
            sent.append(data.nbytes)
        return isend(data, peer, tag)

    sub.backend.isend = counted
    x = np.full(1009, float(comm.rank))
    sub.broadcast(x, algorithm=name)
    assert (x == 0).all() and max(sent, default=0) <= 800
    del sub.backend.isend
    assert sub.allreduce(len(sent)) == (comm.size - 1) * 11
    assert sub.allreduce(sum(sent)) == (comm.size - 1) * 8 * 1009
    sub.free()

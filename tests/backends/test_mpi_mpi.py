"""The MPI backend against what mpidist expects of any."""

import pytest
from mpi4py import MPI

import mpidist
from mpidist.backends import mpi_messages
from mpidist.backends.flight import WAITING
from mpidist.backends.mpi import MpiBackend
from mpidist.testing import check_backend
from mpidist.topology import pretended_hosts


def test_conformance(comm):
    made = []

    def make():
        made.append(MpiBackend(comm.backend.comm))
        return made

    assert len(check_backend(make)) == 11
    made[0].close()


def test_conformance_over_nodes(comm):
    """Ranks of other nodes are not on the board: they are asked."""
    hosts = pretended_hosts(comm.size, {"MPIDIST_RANKS_PER_NODE": "1"})
    assert len(check_backend(lambda: [MpiBackend(comm.backend.comm, hosts)])) == 11


def test_tag_limit_after_split(comm):
    """Open MPI knows the limit of tags of MPI_COMM_WORLD only."""
    part = comm.split(comm.rank % 2)
    assert part.backend.tag_limit == comm.backend.tag_limit > 32767
    part.free()


CALLED: set[str] = set()  # on a Recorded
LOCAL = {"Get_rank", "Get_size", "Get_group", "Set_errhandler", "rank"}
MESSAGES = {"Isend", "Irecv", "Recv", "Iprobe", "Send_init", "Recv_init"}


class Recorded(MPI.Intracomm):
    """A communicator, and those made of it, that record the MPI functions called."""

    def __getattribute__(self, name):
        if not name.startswith("_"):
            CALLED.add(name)
        return super().__getattribute__(name)

    def Create_group(self, *arguments):
        return Recorded(super().Create_group(*arguments))


@pytest.mark.parametrize("nodes", ["as they are", "one for each rank"])
def test_set_up_calls_no_collective_of_mpi(comm, monkeypatch, nodes):
    """Open MPI's first collective on a communicator over several nodes takes up to 0.4 s."""
    ours = nodes != "as they are"
    if ours:
        monkeypatch.setenv("MPIDIST_RANKS_PER_NODE", "1")
    CALLED.clear()
    whole = mpidist.init(comm=Recorded(comm.backend.comm))
    others = sorted(CALLED - LOCAL - MESSAGES)
    assert others == (["Dup"] if ours else ["Dup", "Split_type"])
    CALLED.clear()
    parts = [whole.split(whole.rank % 2), whole.create_group(range(whole.size))]
    assert sorted(CALLED - LOCAL - MESSAGES) == ["Create_group"]
    assert [type(part.backend.comm) for part in parts] == [Recorded, Recorded]
    for made in (*parts, whole):
        made.free()


@pytest.mark.mpi(min_size=2)
def test_what_nobody_received_is_dropped_without_a_matched_probe(comm):
    """Open MPI 4 over libfabric, as on Debian 12, finds the message and cannot receive it."""
    CALLED.clear()
    group = Recorded(comm.backend.comm.Dup())
    sent = [group.isend(7, peer) for peer in range(group.size) if peer != comm.rank]
    mpi_messages.drain(group, 5)
    MPI.Request.Waitall(sent)
    group.Free()
    assert {"Iprobe", "Recv"} <= CALLED and not CALLED & {"Improbe", "Mprobe"}


def test_groups_that_are_freed_leave_no_buffers(comm):
    """Short objects come into buffers of 9 kB, which are kept to be used again.

    All communicators share them: with a free list of its own, each group would leave one behind.
    """

    def use():
        group = comm.split(0)
        group.allgather_object(group.rank)
        group.free()

    for _ in range(3):
        use()
    before = len(mpi_messages._short_buffers)
    for _ in range(20):
        use()
    assert len(mpi_messages._short_buffers) <= before + 2


def test_a_wait_that_was_interrupted_is_over_once_all_have_arrived(comm):
    """Also if they arrive while this rank looks around, and it waits no more."""
    backend = comm.backend
    track = backend.track
    comm.barrier()
    track.wait("/a/train.py:41")
    assert backend.arrive(backend.board.reached(comm.rank), None) and track.waits is None
    assert track.state[WAITING] == 0
    comm.barrier()

"""The round trip of a cache line between ranks 0 and 1, under mpiexec."""

import pytest

from mpidist.communicator.layers import calibrate, round_trip
from tests.support.pretended import on_nodes


@pytest.mark.one_node
@pytest.mark.parametrize("per_node", [2, 3])
def test_what_ranks_choose_by_is_equal_on_all(comm, per_node):
    """Also where a node has fewer ranks than the others, and where only some have enough cores."""
    made = on_nodes(comm, per_node)
    every = made.allgather_object((calibrate(made), made.backend.crowded))
    assert every == every[:1] * comm.size
    made.free()


def test_every_rank_knows_the_round_trip(comm):
    """Within what a line and the scheduler can take; unknown where ranks share a core."""
    found = [comm.allgather_object(round_trip(comm)) for _ in range(3)]
    assert all(each == [each[0]] * comm.size for each in found)
    alone = len(comm.topology.groups[0]) < 2 or comm.backend.native is None
    for seconds in (each[0] for each in found):
        assert seconds is None or (not alone and 10e-9 < seconds < 3e-6)
    trips = comm._service._trips
    if alone or comm.backend.crowded:
        assert trips is None
        return
    counted = comm.allgather_object(int(trips._own[0]) if trips and trips.takes_part else None)
    assert counted[0] == counted[1] >= 3 * 33, "every trip was answered"
    comm.barrier()


def test_a_split_communicator_has_its_own(comm):
    part = comm.split(comm.rank % 2)
    seconds = round_trip(part)
    assert seconds is None or part.size > 1
    part.free()
    comm.barrier()

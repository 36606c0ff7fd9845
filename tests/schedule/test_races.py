"""Data races are what the orders of a schedule leave open."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.errors import ScheduleError
from mpidist.schedule import Get, Meet, Put, prove

STEPS = st.one_of(
    st.just("meet"),
    st.tuples(
        st.sampled_from(("put", "get")), st.integers(0, 2), st.integers(1, 2), st.integers(0, 1)
    ),
)


@settings(deadline=None, max_examples=300)
@given(st.lists(STEPS, max_size=9))
def test_races_are_what_the_orders_leave_open(program):
    """Every conflict that no chain of rounds and meetings orders is found, and no other."""
    rounds = {rank: [Meet(range(3))] for rank in range(3)}
    accesses = []  # rank, meetings before it, its round, owner, block, whether a write
    for step in program:
        if step == "meet":
            for rank in rounds:
                rounds[rank].append(Meet(range(3)))
            continue
        kind, rank, by, block = step
        peer = (rank + by) % 3
        epoch = sum(isinstance(r, Meet) for r in rounds[rank]), len(rounds[rank])
        if kind == "put":
            rounds[rank].append(Put(peer, block, source="in"))
            accesses += [(rank, *epoch, rank, block, False), (rank, *epoch, peer, block, True)]
        else:
            rounds[rank].append(Get(peer, block, source="in", target="tmp"))
            accesses.append((rank, *epoch, peer, block, False))
    for rank in rounds:
        rounds[rank].append(Meet(range(3)))

    def wrong(a, b):
        if a[3:5] != b[3:5] or not (a[5] or b[5]) or a[:3] == b[:3]:
            return False
        if a[0] != b[0] and a[1] == b[1]:
            return True  # a race
        first, second = sorted((a, b), key=lambda access: access[1:3])
        return first[5] and not second[5]  # the input is gone

    with pytest.raises(ScheduleError) as caught:
        prove("allreduce", lambda rank, size: rounds[rank], 3, memory="mapped", blocks=2)
    found = "race" in str(caught.value) or "the same memory" in str(caught.value)
    assert found == any(wrong(a, b) for a, b in combinations(accesses, 2)), caught.value

"""Guests: whichever node is lost, the next one has what its ranks alone had."""

import numpy as np
import pytest

import mpidist as md
from mpidist.communicator import layers
from mpidist.recovery import records
from mpidist.recovery.copies import Copy, read_copies, write_copy
from mpidist.recovery.guests import Guests, host_of
from mpidist.recovery.packing import packed, unpacked
from mpidist.recovery.records import Ranks


@pytest.mark.parametrize(
    "groups, hosts",
    [
        ([[0, 1], [2, 3]], [2, 3, 0, 1]),
        ([[0, 2], [1, 3]], [1, 0, 3, 2]),
        ([[0, 1], [2, 3], [4, 5, 6]], [2, 3, 4, 5, 0, 1, 0]),
        ([[0], [1, 2, 3]], [1, 0, 0, 0]),
    ],
)
def test_host_is_on_the_next_node(groups, hosts):
    size = sum(map(len, groups))
    assert [host_of(groups, rank) for rank in range(size)] == hosts


@pytest.mark.parametrize("nodes", ["aabb", "abab", "aabbccc", "abbb"])
@pytest.mark.parametrize("last", [1, 4])  # steps: of one vault's slot, and of all
def test_a_lost_node(tmp_path, nodes, last):
    """What all have alike is read from those that are left, and each lost rank's own."""
    size, ranks = len(nodes), Ranks(1, 0, 0, len(nodes))
    for node in nodes:
        (tmp_path / node).mkdir(exist_ok=True)

    def train(comm):
        folder = tmp_path / nodes[comm.rank]
        vault = ranks.vault(folder, comm.rank)
        guests = Guests(comm, lambda rank: ranks.vault(folder, rank, comm.rank))
        here = next(group for group in comm.topology.groups if comm.rank in group)
        for step in range(1, last + 1):
            rows = np.full(3 + comm.rank, 100 * step + comm.rank)
            own = {"rows": [packed(rows, "rows")]}
            head = Copy(b"%d" % comm.rank, {}, b"small", own, [], [], b"", {})
            shared = {"x": packed(np.arange(9) + step, "x")}
            parts = write_copy(vault, step, head, shared, here.index(comm.rank), len(here))
            guests.exchange(step, parts, 1)
        vault.close()
        guests.close()

    md.run_simulated(size, train, nodes=nodes)
    for lost in (None, *sorted(set(nodes))):
        left = [tmp_path / node for node in nodes if node != lost]

        def go_on(comm, left=left):
            there = records.found(left[comm.rank])[ranks]
            offers = layers.everyone(comm, {r: one.steps() for r, one in there.items()})
            assert records.last_step([{ranks: offer} for offer in offers]) == (1, last)
            step, heads, shared = read_copies(comm, offers, there, size)
            assert step == last and sorted(heads) == list(range(size))
            assert np.array_equal(unpacked([shared["x"]], "x"), np.arange(9) + last)
            for rank, head in heads.items():
                assert head.generators == b"%d" % rank
                rows = unpacked(head.parts["rows"], "rows")
                assert rows.tolist() == [100 * last + rank] * (3 + rank)

        md.run_simulated(len(left), go_on)


def test_two_neighbours_lost_are_too_many(tmp_path):
    """Of three nodes: then what the first one's ranks alone had is gone."""
    ranks = Ranks(1, 0, 0, 3)

    def train(comm):
        vault = ranks.vault(tmp_path, comm.rank)
        guests = Guests(comm, lambda rank: ranks.vault(tmp_path, rank, comm.rank))
        head = Copy(b"", {}, b"", {"u": [packed(np.ones(2), "u")]}, [], [], b"", {})
        guests.exchange(1, write_copy(vault, 1, head, {}, 0, 1), 1)

    md.run_simulated(3, train, nodes="abc")
    (there,) = records.offered(records.found(tmp_path)).values()
    assert [record[1].shares for record in there.values()] == [1, 1, 1]  # its own before a guest's
    for path in tmp_path.iterdir():  # of what the last rank has
        if not (path.name.startswith("1.0.0.2-of-3.") or "-by-2" in path.name):
            path.unlink()
    offer = records.offered(records.found(tmp_path))
    assert sorted(offer[ranks]) == [1, 2] and records.last_step([offer]) is None
    assert records.missing([offer[ranks]], 3) == "that of rank 0 is gone"

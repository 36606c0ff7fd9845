"""Copies: the shares of the ranks are together what they have alike, wherever their records are."""

import numpy as np
import pytest

import mpidist as md
from mpidist.communicator import layers
from mpidist.errors import CommunicationError
from mpidist.recovery.copies import Copy, Own, objects_alone, read_copies, write_copy
from mpidist.recovery.packing import packed, to_parts, unpacked
from mpidist.recovery.vault import Reader, Vault


def a_copy(rank, parts=()):
    own = {name: [packed(np.full(2, rank), name)] for name in parts}
    return Copy(b"%d" % rank, {}, b"small", own, [], [], b"", {})


def exchanged(comm, vault, apart=False):
    """Return what each rank can read, and this one's readers; if `apart`, its own records only."""
    names = layers.everyone(comm, vault.names)
    ranks = [comm.rank] if apart else range(comm.size)
    readers = {r: Reader.open(names[r], r) for r in ranks}
    held = {r: reader.steps() for r, reader in readers.items()}
    return layers.everyone(comm, held), readers


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_shares_are_put_together(size, apart):
    x, y = np.arange(7), np.arange(4, dtype="float32").reshape(2, 2)

    def program(comm):
        shared, vault = {"x": packed(x, "x"), "y": packed({"y": y}, "y")}, Vault()
        for step in (1, 2):
            head = a_copy(10 * step + comm.rank, ["rows"])
            write_copy(vault, step, head, shared, comm.rank, comm.size)
        offers, readers = exchanged(comm, vault, apart)
        found = read_copies(comm, offers, readers, comm.size)
        assert objects_alone(readers) == ["rows"]
        layers.everyone(comm, None)
        vault.close()
        return found

    for step, heads, shared in md.run_simulated(size, program):
        assert step == 2
        assert [heads[r].generators for r in range(size)] == [b"%d" % (20 + r) for r in range(size)]
        assert np.array_equal(unpacked([shared["x"]], "x"), x)
        assert np.array_equal(unpacked([shared["y"]], "y")["y"], y)
        rows = [unpacked(heads[r].parts["rows"], "rows") for r in range(size)]
        assert [row.tolist() for row in rows] == [[20 + r] * 2 for r in range(size)]


def test_record_that_is_no_copy():
    """Of a rank that had not come so far: then the objects are where they were."""

    def program(comm):
        vault = Vault()
        if comm.rank:
            write_copy(vault, 0, a_copy(comm.rank), {}, comm.rank, comm.size)
        else:
            vault.write(0, to_parts(Own(b"", {})))
        offers, readers = exchanged(comm, vault)
        found = read_copies(comm, offers, readers, comm.size)
        assert objects_alone(readers) == []
        layers.everyone(comm, None)
        return found

    assert md.run_simulated(2, program) == [None, None]


def test_records_too_far_apart_are_named():
    def program(comm):
        vault = Vault()
        write_copy(vault, comm.rank, a_copy(0, ["rows"]), {}, comm.rank, comm.size)
        offers, readers = exchanged(comm, vault)
        with pytest.raises(CommunicationError, match="no step of which all ranks have left"):
            read_copies(comm, offers, readers, comm.size)
        layers.everyone(comm, None)

    md.run_simulated(2, program)

"""Records for the next start of a job: which are complete, and which folder is refused."""

import errno
import os
import subprocess
import sys

import numpy as np
import pytest

import mpidist as md
from mpidist.errors import InvalidArgument, LaunchError
from mpidist.recovery import records
from mpidist.recovery.records import RESTART, VAULTS, Ranks
from mpidist.recovery.vault import SLOTS, Record
from tests.support import processes
from tests.support.jobs import LIMIT, ROOT


def write(folder, ranks, steps):
    """Leave records as ranks do: `steps` of each rank, None for a rank without a vault."""
    for rank, those in enumerate(steps):
        if those is not None:
            vault = ranks.vault(folder, rank)
            for step in those:
                vault.write(step, [b"%d of %d" % (step, rank)])
            vault.close()


def lengths(folder, training=None):
    return records.offered(records.found(folder, training))


def last_step(folder):
    step = records.last_step([lengths(folder)])
    return None if step is None else step[1]


ANY = Record(1, 1)


def test_vault_in_a_folder_is_read_after_its_end_and_made_anew(tmp_path):
    ranks = Ranks(1, 2, 3, 2)
    write(tmp_path, ranks, [[4, 5], [4, 5, 6]])
    assert oct(os.stat(ranks.files(tmp_path, 0)[0]).st_mode & 0o777) == "0o600"
    there = records.found(tmp_path)
    assert list(there) == [ranks] and there[ranks][1].read(6) == b"6 of 1"
    write(tmp_path, ranks, [[7], [7]])
    assert last_step(tmp_path) == 7
    assert there[ranks][1].read(6) == b"6 of 1"  # whoever had it open reads on


@pytest.mark.parametrize(
    "steps, expected",
    [
        ([[4, 5, 6], [4, 5]], 5),
        ([[4, 5, 6], [5, 6, 7]], 6),
        ([[1], [5]], None),
        ([[5], None], None),
        ([[5], []], None),
        ([None, None], None),
    ],
)
def test_newest_step_is_one_of_all_ranks(tmp_path, steps, expected):
    write(tmp_path, Ranks(1, 0, 0, 2), steps)
    assert last_step(tmp_path) == expected


def test_newest_ranks_win_if_they_are_complete(tmp_path):
    old, torn, other = Ranks(1, 0, 4, 2), Ranks(1, 1, 5, 3), Ranks(2, 0, 0, 1)
    write(tmp_path, old, [[8, 9], [8, 9]])
    write(tmp_path, torn, [[9], None, [9]])
    there = lengths(tmp_path, 1)
    assert records.newest([there]) == (old, 9)
    assert records.missing([there[torn]], 3) == "that of rank 1 is gone"
    # Where each place has a part, they are complete together.
    parts = [{torn: {0: {9: ANY}}}, {torn: {1: {9: ANY}, 2: {9: ANY}}}]
    assert records.newest(parts) == (torn, 9)
    write(tmp_path, other, [[2]])
    assert records.last_step([lengths(tmp_path)]) == (2, 2)  # of the last training


def test_newer_records_of_a_rank_count_where_a_begin_was_left(tmp_path):
    """Its ranks were in other places: a file of another name, of one node or of two, has stayed."""
    ranks = Ranks(1, 0, 1, 2)
    for by, step in ((0, 4), (1, 9), (None, 7)):
        ranks.vault(tmp_path, 1, by).write(step, [b"x"])
    assert list(lengths(tmp_path)[ranks][1]) == [9]


def test_missing_says_too_far_apart():
    assert records.missing([{0: {1: ANY}, 1: {5: ANY}}], 2) == "they are too far apart"


def test_remove_before_leaves_these_and_other_trainings(tmp_path):
    kept = [Ranks(1, 1, 2, 1), Ranks(2, 0, 0, 1), Ranks(1, 1, 3, 1)]
    for ranks in (*kept, Ranks(1, 0, 9, 1), Ranks(1, 1, 1, 4)):
        write(tmp_path, ranks, [[1]])
    records.remove_before(tmp_path, kept[0])
    assert set(records.found(tmp_path)) == set(kept)


def test_too_little_room_in_the_folder_is_said(tmp_path, monkeypatch):
    room = os.statvfs_result((4096, 4096, 50, 50, 50, 9, 9, 9, 0, 255))
    vault = Ranks(1, 0, 0, 1).vault(tmp_path, 0)
    monkeypatch.setattr(os, "fstatvfs", lambda _: room)
    vault.write(1, [bytes(60_000)])
    with pytest.raises(
        MemoryError, match=r"takes 200000 bytes .* 600000 for 3 steps; 204800 are free in /"
    ):
        vault.write(2, [bytes(200_000)])
    with pytest.raises(
        MemoryError, match="360000 for 3 steps and each of 2 ranks; 204800 are free"
    ):
        vault.write(2, [bytes(120_000)], share=1, shares=2)


def test_state_that_does_not_fit_into_the_folder_is_told_before_mpi_starts(tmp_path, monkeypatch):
    """Three times what the ranks have alike, and what an earlier start has left is room."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv(VAULTS, str(tmp_path))
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setattr("mpidist.recovery.state.room", lambda _: 299_999)
    said = r"rank 1: the state of a step takes 100000 bytes .* 300000 for 3 steps; 299999 are free"
    with pytest.raises(MemoryError, match=rf"{said} in {tmp_path.parent} on \S+: make it larger"):
        md.State(w=np.zeros(100_000, np.uint8))
    md.State(w=np.zeros(99_999, np.uint8))
    (tmp_path / "left").write_bytes(bytes(1000))
    md.State(w=np.zeros(100_000, np.uint8))


def test_full_folder_is_told_with_the_sizes(tmp_path, monkeypatch):
    """Where another program has been faster than the look at the room."""
    vault = Ranks(1, 0, 0, 1).vault(tmp_path, 0)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        vault.write(1, [])  # the mark, which needs a page
    pwrite = iter([lambda *_: 0, full])
    monkeypatch.setattr(os, "pwrite", lambda *words: next(pwrite)(*words))
    with pytest.raises(MemoryError, match=rf"takes 9 bytes .* are free in {tmp_path.parent} on "):
        vault.write(1, [b"too large"])


SMALL = """
import os, sys
import numpy as np
import mpidist as md

w, again = np.zeros(int(sys.argv[1]), np.uint8), int(os.environ["MPIDIST_RESTART"])

@md.elastic
def train(comm, state):
    for step in range(state.step, 8):
        comm.allreduce(np.ones(1))
        w[:] = step + 1
        state.commit()
        comm.barrier()  # the other one has committed, too
        if comm.rank == 1 and (again, step) in ((0, 4), (1, 6)):
            os.kill(os.getpid(), 9)
    os.write(1, b"%d ends\\n" % w[0])

train(md.State(w=w, copies=True))
"""
GROWS = """
import numpy as np
import mpidist as md
from mpidist import nn

net = nn.Linear(3000, 1000)
optimizer = nn.Adam(net.parameters())

@md.elastic
def train(comm, state):
    for p in net.parameters():
        p.grad = np.ones_like(p.data)
    comm.allreduce(np.ones(1))
    optimizer.step()
    state.commit()

train(md.State(net=net, optimizer=optimizer))
"""


def in_100_mib(tmp_path, text, *words):
    """Run a job of two ranks with 100 MiB in /dev/shm, of which the MPI takes some."""
    if subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "x", "/mnt"], stderr=-3).returncode:
        pytest.skip("needs root and a mount namespace")
    (tmp_path / "small.py").write_text(text)
    run = [sys.executable, "-m", "mpidist", "run", "-q", "-n", "2", "--max-restarts", "3"]
    inside = 'mount -t tmpfs -o size=100m x /dev/shm && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", inside, "sh", *run, str(tmp_path / "small.py"), *words]
    return processes.run(command, LIMIT, processes.environment(PYTHONPATH=str(ROOT)))


@pytest.mark.long
def test_next_starts_need_no_more_room_than_the_first(tmp_path):
    done = in_100_mib(tmp_path, SMALL, "20000000")
    assert done.status == 0, done.output
    assert done.output.count("8 ends") == 2 and "start 3 of 4, from step 7" in done.output


@pytest.mark.long
@pytest.mark.parametrize("text, size", [(SMALL, 40_000_000), (GROWS, 36_012_000)])
def test_too_large_a_state_is_told_once_and_at_once(tmp_path, text, size):
    """With an optimizer, which has its moments after the first step only."""
    done = in_100_mib(tmp_path, text, str(size))
    assert done.status == 1, done.output
    assert f"takes {size} bytes of the vaults of this node, {3 * size} for 3" in done.output
    assert done.output.endswith("no new start: MemoryError would come again\n")


def test_folder_must_be_this_users_alone(tmp_path, monkeypatch):
    monkeypatch.setenv(VAULTS, "")
    assert records.folder() is None
    monkeypatch.setenv(VAULTS, str(tmp_path))
    tmp_path.chmod(0o700)
    assert records.folder() == tmp_path
    tmp_path.chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path)
    for wrong in (tmp_path, tmp_path / "missing", tmp_path / "link"):
        monkeypatch.setenv(VAULTS, str(wrong))
        with pytest.raises(LaunchError, match="expected a folder of this user"):
            records.folder()


def test_start_is_a_number(monkeypatch):
    assert records.start() == 0
    monkeypatch.setenv(RESTART, "2")
    assert records.start() == 2
    monkeypatch.setenv(RESTART, "-1")
    with pytest.raises(LaunchError, match="MPIDIST_RESTART='-1': expected a whole number"):
        records.start()


def test_state_without_copies_is_refused_where_they_are_needed(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    monkeypatch.setenv(VAULTS, str(tmp_path))
    assert md.State().copies
    with pytest.raises(InvalidArgument, match="copies=False: under mpidist run --max-restarts"):
        md.State(copies=False)


def test_fewer_ranks_of_the_same_generation_that_came_further_count():
    """They began where a rank was lost in the last exchange of a begin, all having written."""
    more, fewer = Ranks(1, 0, 1, 3), Ranks(1, 0, 1, 2)

    def each(ranks, *steps):
        return {rank: dict.fromkeys(steps, ANY) for rank in range(ranks)}

    steps = {more: each(3, 4), fewer: each(2, 4, 5, 6)}
    assert records.newest([steps]) == (fewer, 6)
    later = {Ranks(1, 0, 2, 2): each(2, 5)}
    assert records.newest([steps, later]) == (Ranks(1, 0, 2, 2), 5)
    assert records.newest([{}]) is None


def of_nodes(*nodes, size=4, alone=0):
    """Return what is left of 2 nodes of 2 ranks: the steps of each rank, None for a lost rank."""
    offer = {
        2 * node + share: {step: Record(9, 5, share, 2, alone) for step in steps}
        for node, ranks in enumerate(nodes)
        for share, steps in enumerate(ranks)
        if steps is not None
    }
    return {Ranks(1, 0, 0, size): offer}


@pytest.mark.parametrize(
    "nodes, alone, step, left",
    [
        (([[4, 5], [4, 5]], [[4], [4]]), 0, 4, [0, 1, 2, 3]),  # a later one would not be of all
        (([[4, 5], [4, 5]], [None, None]), 0, 5, [0, 1]),
        (([None, None], [[4, 5], [4]]), 0, 4, [2, 3]),
        (([None, [5]], [[5], None]), 0, 5, [1, 2]),  # the two shares, of two nodes
        (([None, [5]], [None, [5]]), 0, None, []),
        (([[5], [5]], [None, None]), 1, None, []),
        (([[5], [5]], [[5], [5]]), 1, 5, [0, 1, 2, 3]),
    ],
)
def test_records_of_the_nodes_that_are_left(nodes, alone, step, left):
    offer = of_nodes(*nodes, alone=alone)
    assert records.last_step([offer]) == (None if step is None else (1, step))
    assert records.from_text(f"a word before\n{records.as_text(offer)}\n") == offer
    found = records.complete(list(offer.values()), 4)
    assert sorted(found.get(step, ())) == left


def test_records_of_all_ranks_count_more_than_later_ones_of_a_node():
    """A start that was killed in its begin, when only the ranks of one node had written."""
    whole, begun = of_nodes([[5], [5]], [[5], [5]]), of_nodes([[5], [5]], [None, None])
    offers = [whole, {Ranks(1, 1, 1, 4): begun[Ranks(1, 0, 0, 4)]}]
    assert records.newest(offers) == (Ranks(1, 0, 0, 4), 5)


def test_text_of_something_else_is_no_offer():
    assert records.from_text("command not found") is None
    assert records.from_text(records.as_text({})) == {}


def test_records_that_cannot_be_read_are_none_and_the_node_is_there(tmp_path, capsys):
    for slot in range(SLOTS):
        (tmp_path / f"0.0.0.0-of-1.mpidist-vault-{slot}").symlink_to("/dev/null")  # another file
    records.tell(tmp_path)
    told = capsys.readouterr()
    assert records.from_text(told.out) == {}
    assert "cannot be read" in told.err

"""Jobs in which something goes wrong, or a rank is stopped or interrupted inside an operation.

``mpiexec -n N python failure_jobs.py NAME``: each prints what its ranks saw; test_failures.py,
test_interrupts.py and test_bad_input.py read it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

import mpidist
from mpidist.backends import memory_file
from mpidist.errors import (
    CollectiveTimeout,
    CommunicatorBroken,
    InvalidArgument,
    InvalidRank,
    MpidistError,
    RankFailed,
    UnknownName,
    Unsupported,
    UnsupportedDtype,
)
from mpidist.nn import Identity

# What the ranks say to the test that has started them, and to each other, is in files, one for each
# rank: a launcher that ends a job may drop the last lines of its output.
FOLDER = "JOB_WORDS"  # the environment variable that names the folder
PATIENCE = 30.0  # seconds that a rank waits for the words of another

DEADLINE = 3.0  # within which a rank that is not meant to be late comes, though it may be held up
# Seconds that a rank which never comes would stay away: who waits for that, or has this as a
# deadline and waits for it, outlasts the LIMIT of jobs.py, and so fails the test.
HANG = 600.0


def say(comm, text: str) -> None:
    """Print it too, for who reads the output of a test that failed."""
    sys.stdout.write(f"<{comm.rank}> {text}\n")
    sys.stdout.flush()
    if folder := os.environ.get(FOLDER):
        with open(Path(folder) / str(comm.rank), "a", encoding="utf-8") as file:
            file.write(text + "\n")


def stay(ranks: Iterable[int], text: str = "", patience: float = PATIENCE) -> None:
    """Stay until all those ranks have said what begins so: the end of this one may end the job."""
    folder, until = os.environ.get(FOLDER), time.monotonic() + patience
    left = set(ranks) if folder else set()
    while left and time.monotonic() < until:
        left -= {rank for rank in left if any(w.startswith(text) for w in words(folder, rank))}
        time.sleep(0.01)


def words(folder: str, rank: int) -> list[str]:
    """Return the lines that a rank has said, each whole."""
    path = Path(folder) / str(rank)
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def start(timeout=DEADLINE, **more):
    """Give a communicator; ranks that are slow to start are none of its deadline's business."""
    comm = mpidist.init(timeout=None if timeout is None else HANG, **more)
    assert comm.allreduce(1, algorithm="linear") == comm.size
    comm.timeout = timeout
    return comm


def expect(error, call, *words):
    """The call must raise `error` with all the words in its message."""
    try:
        call()
    except error as caught:
        text = str(caught)
        for word in words:
            assert word in text, f"{word!r} is not in {text!r}"
        return caught
    raise AssertionError(f"no {error.__name__}")


def usable(comm):
    """After an error: everything works, and gives what it should."""
    p, r = comm.size, comm.rank
    for algorithm in ("native", "linear", "ring", "auto"):
        assert (comm.allreduce(np.full(7, r + 1.0), algorithm=algorithm) == p * (p + 1) / 2).all()
        assert comm.allgather(r, algorithm=algorithm).tolist() == list(range(p))
    comm.barrier()
    say(comm, "usable")


# -- bad input on every rank --------------------------------------------------------------------


class OnTheGpu:
    """Looks like an array on a GPU."""

    __cuda_array_interface__ = {"shape": (3,), "typestr": "<f8", "data": (1, False), "version": 3}


def bad_input():
    comm = start(HANG)
    p, r, x = comm.size, comm.rank, np.ones(4)
    me = f"rank {r}"
    for root in (p, -1, 1.0, "0", None, True):
        for call in (comm.broadcast, comm.gather, comm.scatter, comm.reduce, comm.igather):
            error = expect(InvalidRank, lambda c=call, t=root: c(x, root=t), me, f"0 … {p - 1}")
            assert error.size == p and error.rank == root
    expect(UnknownName, lambda: comm.allreduce(x, algorithm="rign"), "'ring'", "did you mean")
    expect(UnknownName, lambda: comm.broadcast(x, algorithm="binominal"), "'binomial'")
    expect(UnknownName, lambda: comm.barrier("treee"), "'tree'")
    expect(UnknownName, lambda: comm.allreduce(x, algorithm=["ring"]), "known")
    expect(UnknownName, lambda: comm.allreduce(x, "summ"), "'sum'")
    expect(UnknownName, lambda: comm.explain("allreduse", 8), "'allreduce'")
    expect(InvalidArgument, lambda: comm.allreduce(x, algorithm="tree:1"), "arity")
    expect(InvalidArgument, lambda: comm.allreduce(x, algorithm="ring:3"), "no arity")
    expect(InvalidArgument, lambda: comm.allreduce(x, 5), "sum, mean")
    expect(InvalidArgument, lambda: comm.allreduce(x, lambda a, b: a), "commutative")
    expect(UnsupportedDtype, lambda: comm.allreduce(x, "xor"), me, "float64", "sum")
    expect(UnsupportedDtype, lambda: comm.allreduce(x.astype(int), "mean"), me, "sum")
    expect(UnsupportedDtype, lambda: comm.allreduce(np.array(["a", "b"])), me)
    expect(UnsupportedDtype, lambda: comm.allreduce(np.array([{}])), me, "allgather_object")
    expect(UnsupportedDtype, lambda: comm.allreduce(x.astype(complex), "max"), me)
    # Without a device that is the reason, with one the address.
    expect(MpidistError, lambda: comm.allreduce(OnTheGpu()), me, "x", "GPU")
    expect(InvalidArgument, lambda: comm.allreduce(x, out=OnTheGpu()), me)
    expect(InvalidArgument, lambda: comm.allreduce([[1], [1, 2]]), me)
    bad_out(comm, x, me)
    expect(Unsupported, lambda: comm.allreduce(x, ordered(), algorithm="ring"), "linear")
    for call in (comm.scatter, comm.alltoall, comm.reduce_scatter):
        expect(InvalidArgument, lambda c=call: c(np.array(1.0)), me, "0-d")
        expect(InvalidArgument, lambda c=call: c(np.ones((p + 1, 2))), me, "evenly")
    for counts in ([1], [1] * (p - 1) + [-1], [0.5] * p, 3):
        expect(InvalidArgument, lambda c=counts: comm.allgather(x, counts=c), me, "counts")
    expect(InvalidArgument, lambda: comm.alltoall(np.ones(p + 1)), me, "counts=")
    for peer in (p, -1, "0", r):
        expect(InvalidArgument, lambda q=peer: comm.send(x, q), me, "peer")
    expect(InvalidArgument, lambda: comm.split(-1), me, "color")
    expect(InvalidArgument, lambda: comm.recv(x, (r + 1) % p, tag=-1), me, "tag")
    for options in ({"segment_bytes": 0}, {"window": 0}, {"window": 1.5}):
        expect(InvalidArgument, lambda o=options: mpidist.Communicator(comm.backend, **o), me)
    expect(MpidistError, lambda: setattr(comm, "timeout", 0), "timeout")
    expect(InvalidArgument, lambda: mpidist.init(timeout=3), "other settings")
    usable(comm)


def ordered():
    return mpidist.Op(lambda a, b: a, commute=False)


def bad_out(comm, x, me):
    frozen, p = np.empty(4), comm.size
    frozen.flags.writeable = False
    expect(InvalidArgument, lambda: comm.allreduce(x, out=frozen), me, "read-only")
    expect(InvalidArgument, lambda: comm.allreduce(x, out=np.empty(5)), me, "(5,)", "(4,)")
    expect(InvalidArgument, lambda: comm.allreduce(x, out=np.empty((2, 2))), me, "(2, 2)")
    expect(InvalidArgument, lambda: comm.allreduce(x, out=np.empty(4, "f4")), me, "float32")
    expect(InvalidArgument, lambda: comm.allreduce(x, out=[0] * 4), me, "list")
    expect(InvalidArgument, lambda: comm.allgather(x, np.empty(4 * p + 1)), me, "shape")
    whole = np.ones(5)
    expect(InvalidArgument, lambda: comm.allreduce(whole[:4], out=whole[1:]), me, "overlaps")
    expect(InvalidArgument, lambda: comm.iallreduce(whole[1:], out=whole[:4]), me, "overlaps")
    rows = np.ones(4 * p + 1)
    wrong = rows[4 * comm.rank + 1 : 4 * comm.rank + 5]
    expect(InvalidArgument, lambda: comm.allgather(wrong, rows[: 4 * p]), me, "overlaps")
    if comm.rank and os.environ.get("MPIDIST_DEBUG", "0") == "0":
        expect(InvalidArgument, lambda: comm.broadcast(frozen, 0), me, "read-only")
        expect(InvalidArgument, lambda: comm.broadcast(None, 0), me, "broadcast_object")
        expect(MpidistError, lambda: comm.broadcast(OnTheGpu(), 0), me, "GPU")
    assert (whole == 1).all() and (rows == 1).all()


# -- the ranks differ ---------------------------------------------------------------------------


def debug_mismatches():
    """With MPIDIST_DEBUG=1 every rank gets the table, and the communicator stays usable."""
    comm = start(HANG)
    r, shared = comm.rank, comm.empty(50_000)
    private, part = np.ones(50_000), shared[r == 1 :][:9]
    halves = [25_000, 25_000, *[0] * (comm.size - 2)]
    cases = {
        "kind": lambda: comm.barrier() if r == 1 else comm.allreduce(1),
        "length": lambda: comm.allreduce(np.ones(3 + (r == 1))),
        "op": lambda: comm.allreduce(1, "max" if r == 1 else "sum"),
        "dtype": lambda: comm.allreduce(np.ones(2, "f4" if r == 1 else "f8")),
        "root": lambda: comm.broadcast(np.ones(2), root=r % 2),
        "algorithm": lambda: comm.allreduce(1, algorithm="ring" if r == 1 else "linear"),
        "raises": lambda: comm.reduce(1, root=99 if r == 1 else 0),
        "rows": lambda: comm.allgather(np.ones((r, 2))),
        "native": lambda: comm.iallreduce(np.ones(3 + (r == 1)), algorithm="native"),
        "split": lambda: comm.split(-1 if r == 1 else 0),
        "empty": lambda: comm.empty(3 + (r == 1)),
        "free": lambda: comm.free(shared if r == 1 else shared[1:]),
        "empty and another": lambda: comm.empty(3) if r == 1 else comm.allreduce(1),
        "free and another": lambda: comm.free() if r == 1 else comm.allreduce(1),
        "symmetric on some": lambda: comm.broadcast(private if r == 1 else shared),
        "elsewhere in it": lambda: comm.allreduce(part, out=part, algorithm="symmetric"),
        "background": lambda: (comm.iallreduce if r == 1 else comm.allreduce)(private),
        "counts": lambda: comm.barrier() if r == 1 else comm.alltoall(private, counts=halves),
        "scatter": lambda: comm.barrier() if r == 1 else comm.scatter(np.ones(comm.size)),
    }
    for name, call in cases.items():
        error = expect(mpidist.CollectiveMismatch, call, "the ranks do not call the same")
        lines = str(error).splitlines()[1:]
        assert [line.split(":")[0].strip() for line in lines] == [
            f"rank {k}" for k in range(comm.size)
        ], lines
        assert all("failure_jobs.py:" in line for line in lines), lines
        say(comm, f"table {name}: {lines[1].strip()}")
        assert comm.allreduce(1) == comm.size
    usable(comm)


def mismatches():
    """Without debug: native calls are compared before they are made, on every rank."""
    comm = start(HANG)
    r = comm.rank
    for call in (
        lambda: comm.barrier("native") if r == 1 else comm.allreduce(1, algorithm="native"),
        lambda: comm.allreduce(np.ones(3 + (r == 1)), algorithm="native"),
        lambda: comm.broadcast(np.ones(2), root=r % 2, algorithm="native"),
        lambda: comm.allgather(np.ones(1 + r), algorithm="native"),
    ):
        for late in (0.0, 0.3):  # of one rank, while the others wait so long that they look around
            time.sleep(late if r == 0 else 0)
            expect(mpidist.CollectiveMismatch, call, f"rank {r}: collective #", "MPIDIST_DEBUG=1")
    usable(comm)


def lengths(algorithm):
    """Arrays of different length, no debug: no rank may end with a wrong sum and no error."""
    comm = start()
    try:
        got = comm.allreduce(np.ones(6 - 2 * (comm.rank == 1)), algorithm=algorithm)
        say(comm, f"returned {got.tolist()}")
    except MpidistError as error:
        expect(CommunicatorBroken, comm.barrier, "broken since allreduce")
        say(comm, f"raised {type(error).__name__}: {error}")
    except BaseException as error:
        say(comm, f"RAW {type(error).__name__}: {error}")
    stay(range(comm.size))


def unlike(algorithm, *forms):
    """Between nodes too, no call takes the data of another: every rank hears what is called where.

    A rank that only sends may hear of it in its next call.
    """
    comm = start(HANG)
    r, x = comm.rank, np.full(8, comm.rank + 1.0)
    rooted = "linear" if algorithm == "ring" else algorithm
    other = "recursive_doubling" if algorithm == "ring" else "ring"
    named = os.environ["MPIDIST_RANKS_PER_NODE"] == "1"  # the board has no room for words

    def matrix(turned):
        """A view that is made anew for each call."""
        return x.reshape((4, 2) if turned else (2, 4))

    cases = {
        "op=max": lambda f: f("allreduce")(x, "max" if r == 1 else "sum", algorithm=algorithm),
        "int64": lambda f: f("allreduce")(x.view("i8") if r == 1 else x, algorithm=algorithm),
        "root=1": lambda f: f("broadcast")(x, int(r == 1), algorithm=rooted),
        "allgather": lambda f: f("allgather" if r == 1 else "allreduce")(x, algorithm=algorithm),
        " 9 x": lambda f: f("allreduce")(np.ones(9 if r == 1 else 8), algorithm=algorithm),
        " 3 x": lambda f: f("allreduce")(np.ones(3 if r == 1 else 90_000), algorithm=algorithm),
        "shape=": lambda f: f("allreduce")(matrix(r == 1), "max", matrix(r == 1), algorithm),
        "by r": lambda f: f("allreduce")(x, algorithm=other if r == 1 else algorithm),
    }
    for form, (name, case) in product(forms, cases.items()):
        made = comm.split(0)

        def call(case=case, made=made, form=form):
            for _ in range(3 if form == "bound" else 0):
                assert (made.allreduce(x, out=x, op="max", algorithm=algorithm) > 0).all()
                made.allreduce(matrix(False), "max", matrix(False), algorithm)
            wait(case(lambda f: getattr(made, f"i{f}" if form == "background" else f)))
            made.allreduce(np.ones(5), algorithm=algorithm)

        error = expect(mpidist.CollectiveMismatch, call, f"rank {r}:", *[name] * named)
        say(comm, f"{form} {name}: {error}")
        if algorithm == "native" and form != "background" and name != "by r":
            assert made.broken is None and made.allreduce(1) == comm.size  # nothing was sent
        else:
            expect(CommunicatorBroken, made.barrier, "broken since")
    usable(comm)


def late_in_its_first_call():
    """What it needs is set up in it: the report names the user's call all the same."""
    comm = mpidist.init(timeout=DEADLINE)
    if comm.rank == 1:
        time.sleep(HANG)
    call = partial(comm.allreduce, np.ones(30_000))
    error = expect(CollectiveTimeout, call, "allreduce op=sum 30000 x float64", "rank 1 not arr")
    assert error.collective == "allreduce" and error.missing == (1,)
    say(comm, "named")
    stay((0, 2), "named")


def differ_in_their_first_call():
    """All hear of it before anything is sent, and go on; or all have a broken communicator."""
    comm = mpidist.init(timeout=HANG)
    r = comm.rank
    call = comm.barrier if r == 2 else partial(comm.allreduce, np.ones(30_000))
    words = ("barrier", "allreduce op=sum 30000 x float64")
    expect(mpidist.CollectiveMismatch, call, f"rank {r}: collective #1", *words)
    usable(comm)
    made = comm.split(0)
    call = partial(made.allreduce, np.ones(9), algorithm="ring" if r == 2 else "native")
    expect(mpidist.CollectiveMismatch, call, f"rank {r}: collective #1")
    assert made.broken is not None
    stay(range(comm.size), "usable")


def wait_in_another_order():
    """Without a deadline too, a native call brings forward what was begun in the background."""
    comm = start(timeout=None)
    made = comm.split(0)
    x, y = np.ones(300_000), np.ones(3)
    for other in (comm, made):
        for call in (
            partial(other.allreduce, y, out=y, op="max", algorithm="native"),
            partial(other.barrier, "native"),
            partial(other.split, 0),
        ):
            for _ in range(3):
                work = comm.iallreduce(x, algorithm="ring")
                if comm.rank == 0:
                    assert (work.wait() == comm.size).all()
                call()
                assert (work.wait() == comm.size).all()
    usable(comm)


def no_board():
    """One rank cannot make the arrival board: the others hear of it, and do without."""
    create = memory_file.create

    def fail(nbytes, purpose, kind=memory_file.KINDS[0]):
        if purpose == "board":
            raise MemoryError("there is none")
        return create(nbytes, purpose, kind)

    memory_file.create = fail
    comm = start(HANG)
    assert comm.backend.board.ranks == (comm.rank,)
    usable(comm)


def begun_in_another_order():
    """MPI's rule is that all begin in one order; with MPIDIST_DEBUG=1 the call sites tell."""
    comm = start(HANG)
    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("mpidist").addHandler(handler)
    a, b = np.full(4, 1.0), np.full(4, 10.0)
    if comm.rank == 1:
        works = [comm.iallreduce(b), comm.iallreduce(a)]
    else:
        works = [comm.iallreduce(a), comm.iallreduce(b)]
    for work in works:
        work.wait()
    assert len(heard) == 1 and heard[0].count("failure_jobs.py:") == comm.size, heard
    usable(comm)


def longer(algorithm):
    """A message that is longer than its receiver expects must not be written past the end."""
    comm = start(HANG)
    n, edge = 30_000, 100_000
    for k in range(20):
        made = comm.split(0)
        room = np.zeros(n + edge)
        mine = n // 2 if comm.rank == 1 else n
        call = made.iallreduce if k % 2 else made.allreduce
        expect(
            MpidistError,
            lambda f=call, r=room, m=mine: wait(f(r[:m], out=r[:m], algorithm=algorithm)),
        )
        assert not room[mine:].any()
    say(comm, "whole")


def wait(work):
    return work.wait() if hasattr(work, "wait") else work


# -- ranks that do not come ---------------------------------------------------------------------


def raises():
    comm = start(timeout=None)
    if comm.rank == 1:
        raise ZeroDivisionError("the rank that is to blame")
    comm.barrier()


def leaves(algorithm):
    """A rank whose program has ended says so: the others need not wait for the deadline."""
    comm = start(HANG)
    x = comm.empty(100_000) if algorithm == "symmetric" else np.ones(9)
    if comm.rank == 1:
        sys.exit(3)
    call = partial(comm.allreduce, x, out=x, algorithm=algorithm)
    lost = expect(RankFailed, call, f"rank {comm.rank}:", "rank 1 not arrived", "has left")
    again = expect(RankFailed, comm.barrier, "broken since allreduce")
    assert lost.ranks == again.ranks == (1,)
    say(comm, "named")
    stay((0, 2), "named")


def differ(first, second):
    """One rank takes another way than the others, or brings another array: all hear of it soon."""
    comm = start(HANG)
    shared, private = comm.empty(100_000), np.ones(100_000)
    arrays = {"slice": shared[1:50_001], "shared": shared[:50_000], "private": private[:50_000]}
    way, name = (second if comm.rank == 1 else first).split(",")
    time.sleep(0.4 * (comm.rank > 0))  # a root does not wait for them, and may be one call ahead
    x = arrays[name]
    call = partial(comm.allreduce, x, out=x, algorithm=way)
    expect((mpidist.CollectiveMismatch, RankFailed), call, f"rank {comm.rank}:")
    say(comm, "named")
    stay(range(comm.size), "named", DEADLINE)  # one that waits for this rank hears when it leaves


def never_comes(algorithm):
    comm = start()
    if comm.rank == 1:
        time.sleep(HANG)
    from mpidist.backends import roll_call  # not before init: it starts MPI, with its own settings

    roll_call.SECONDS = DEADLINE  # two that come within it ask at the same time, and answer
    waits_in_vain(comm, algorithm)


def comes_too_late(algorithm):
    """After the others' deadline: the late rank hears of it at once, and enters no call of MPI."""
    comm = start(HANG)
    late, forms = comm.size - 1, ("first", "bound", "background", "split")
    forms = forms[:2] if algorithm in ("staged", "single_copy") else forms
    for form in forms:
        made = comm.split(0)
        x = made.empty(20_000) if algorithm == "symmetric" else np.ones(20_000)
        allreduce = made.iallreduce if form == "background" else made.allreduce
        for _ in range(0 if form == "first" else 4):
            wait(allreduce(x, out=x, op="max", algorithm=algorithm))

        def call(made=made, x=x, allreduce=allreduce, form=form):
            if form == "split":
                made.split(0)
            wait(allreduce(x, out=x, op="max", algorithm=algorithm))

        if comm.rank == late:
            comm.barrier()
            others = ", ".join(map(str, range(late)))
            named = f"rank {others} has" if late == 1 else f"ranks {others} have"
            reason = f"cannot complete: {named} timed out in this operation"
            words = (f"rank {late}: ", reason)
            expect(
                CommunicatorBroken, call, *words, "split" if form == "split" else "allreduce op=max"
            )
        else:
            made.timeout = DEADLINE
            error = expect(CollectiveTimeout, call, f"rank {late} not arrived")
            assert error.missing == (late,)
            comm.barrier()
        expect(CommunicatorBroken, made.barrier, "broken since")
        say(comm, f"named {form}")
    say(comm, "all named")
    stay(range(comm.size), "all named")


def never_comes_to_a_split():
    comm = start()
    if comm.rank == 1:
        time.sleep(HANG)
    expect(CollectiveTimeout, lambda: comm.split(0), "split", "rank 1 not arrived")
    say(comm, "named")
    stay((0, 2), "named")


def background_never_comes():
    comm = start(HANG)
    if comm.rank == 1:
        time.sleep(HANG)
    work = comm.iallreduce(np.ones(5), algorithm="ring")
    expect(CollectiveTimeout, lambda: work.wait(DEADLINE), "within 3.0 s", "rank 1 not arrived")
    for call in (work.wait, work.test, comm.barrier):
        expect(CommunicatorBroken, call, "broken since allreduce")
    say(comm, "named")
    stay((0, 2), "named")


def stopped():
    comm = start()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    waits_in_vain(comm, "linear", "STOPPED")


def killed():
    comm = start(HANG)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.allreduce(1, algorithm="ring")
    say(comm, "went on")


def killed_in_memory(who, when):
    """Ranks die by SIGKILL among collectives in symmetric memory, or while they make some."""
    comm = start(HANG)
    x, dies = comm.empty(200_000), who == "all" or comm.rank == int(who)
    with open("/proc/self/maps") as maps:
        files = {line.split()[5] for line in maps if "/dev/shm/mpich_shm_" in line}
    say(comm, f"{comm.backend.library}: {files}")
    attach, left = memory_file.attach, [5]

    def attach_and_die(made, nbytes):
        left[0] -= 1
        if dies and when == "empty" and not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return attach(made, nbytes)

    memory_file.attach = attach_and_die
    for k in range(10_000):
        x[:] = comm.rank
        if dies and when == "collective" and k == 30:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.allreduce(x, out=x, algorithm="symmetric")
        if k % 3 == 0:
            comm.empty(1000 + k)
    say(comm, "went on")


def waits_in_vain(comm, algorithm, *words):
    begin = time.monotonic()
    error = expect(
        CollectiveTimeout, lambda: comm.allreduce(np.ones(9), algorithm=algorithm), *words
    )
    seconds = time.monotonic() - begin
    assert DEADLINE * 0.9 < seconds < HANG / 4, seconds
    assert error.missing == (1,) and "rank 1 not arrived" in str(error), error
    assert error.collective == "allreduce" and error.sequence == 2
    for call in (
        lambda: comm.allreduce(1),
        lambda: comm.barrier("native"),
        lambda: comm.iallgather(1),
        lambda: comm.split(0),
        lambda: comm.send(1, 1),
        lambda: comm.broadcast_object(1),
    ):
        expect(CommunicatorBroken, call, "broken since allreduce", "create a new one")
    say(comm, "named")
    stay((0, 2), "named")


def hangs_inside():
    """A rank that arrives and then hangs in the library: only the watchdog can end that."""
    comm = start()
    if comm.rank == 1:
        actions = comm.backend.native.actions
        comm.backend.native.actions = lambda call: [lambda: time.sleep(HANG), *actions(call)]
    comm.allreduce(np.ones(3), algorithm="native")
    say(comm, "went on")


def message_never_comes():
    comm = start()
    if comm.rank == 0:
        expect(CollectiveTimeout, lambda: comm.recv(np.empty(3), 1), "recv from rank 1", "3.0 s")
        expect(CommunicatorBroken, comm.barrier, "recv from rank 1 ended with CollectiveTimeout")
        say(comm, "named")
    else:
        time.sleep(HANG)


def leaves_pending(what):
    """Ranks leave with operations pending, whose messages come after they have let go of them."""
    comm = start(HANG)
    sizes = [200_000] * 3 if what == "sends" else [2**k + 1 for k in range(1, 13)] * 20
    if what == "collectives":
        time.sleep(0.3 if comm.rank == 0 else 0.0)
        for n in sizes[:12]:
            x = np.full(n, 1e300)
            comm.iallreduce(x, out=x, algorithm="ring")
    else:
        if comm.rank == 1:
            for tag, n in enumerate(sizes):
                comm.irecv(np.zeros(n), 0, tag)
        comm.barrier()
        if comm.rank == 0:
            for tag, n in enumerate(sizes):
                comm.isend(np.full(n, 1e300), 1, tag)
    time.sleep(0.5 if comm.rank == 1 else 0.0)
    say(comm, "left")


def stage_raises():
    """The other ranks wait for microbatches without a deadline."""
    comm = start(timeout=None)

    class Stage(Identity):
        saved = ()
        count = 0

        def forward(self, x):
            Stage.count += 1
            if comm.rank == 1 and Stage.count == 3:
                raise ZeroDivisionError("the stage that is to blame")
            return x

    pipe = mpidist.Pipeline(Stage(), comm, 4)
    pipe.step(np.ones((4, 2)), np.ones((4, 2)), lambda y, target: (0.0, y), reduction="mean")


def user_operation_raises():
    comm = start(HANG)

    def broken(a, b):
        raise ArithmeticError("inside the operation")

    comm.allreduce(np.ones(3), mpidist.Op(broken), algorithm="linear")


def launch():
    mpidist.init()


WHO = 1
N = 200_000


class Trap:
    """A sum in the middle of which a rank sends itself a signal, once, when it is armed."""

    def __init__(self, number: int):
        self.number, self.armed = number, False

    def __call__(self, a, b):
        if self.armed and a.size > 2:
            self.armed = False
            os.kill(os.getpid(), self.number)
        return a + b


def summing(comm, how, trap):
    """Give what sums an array by a way; it has been used before, and its next use is a trap."""
    x, op = comm.empty(N), mpidist.Op(trap)
    right = comm.size * (comm.size + 1) / 2

    def call():
        x[:] = comm.rank + 1
        out = x if how == "symmetric" else np.empty(N)
        assert (comm.allreduce(x, op, out=out, algorithm=how) == right).all()

    call()
    trap.armed = comm.rank == WHO
    return call


def is_stopped(pid):
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "T"


def wake(pid):
    """Let a process go on once it is seen to have stopped."""
    end = time.monotonic() + HANG
    while not is_stopped(pid):
        assert time.monotonic() < end
        os.sched_yield()
    os.kill(pid, signal.SIGCONT)


def stopped_for_a_while(how):
    """Before the deadline it goes on: all get the right sums, as if nothing had been."""
    comm = start(HANG)
    pids, call = comm.allgather_object(os.getpid()), summing(comm, how, Trap(signal.SIGSTOP))
    if comm.rank == 0:
        threading.Thread(target=wake, args=(pids[WHO],)).start()
    for _ in range(3):
        call()
    usable(comm)


def stopped_for_too_long(how):
    """The others are told who it is; it goes on then, and nothing is overwritten or hangs."""
    comm = start()
    pids, call = comm.allgather_object(os.getpid()), summing(comm, how, Trap(signal.SIGSTOP))
    kept = np.arange(float(N))
    if comm.rank == WHO:
        try:
            call()  # the others had done their part
        except (CollectiveTimeout, RankFailed):
            say(comm, "late")
        expect((CollectiveTimeout, CommunicatorBroken, RankFailed), comm.barrier, f"rank {WHO}:")
    else:
        expect(CollectiveTimeout, call, "all ranks have arrived", f"rank {WHO} is STOPPED")
        expect(CommunicatorBroken, comm.barrier, "broken since allreduce")
        if comm.rank == 0:
            wake(pids[WHO])
    assert (kept == np.arange(float(N))).all()
    say(comm, "named")
    stay((0, 1), "named")


def interrupted(how):
    """Ctrl-C on one rank, on the default communicator: its end is the end of the job."""
    comm = start(HANG)
    call = summing(comm, how, Trap(signal.SIGINT))
    if comm.rank == WHO:
        expect(KeyboardInterrupt, call)
        expect(CommunicatorBroken, comm.barrier, "broken since allreduce", "KeyboardInterrupt")
        say(comm, "named")
        sys.exit(3)
    call()
    say(comm, "went on")


def interrupted_elsewhere(how):
    """Ctrl-C on one rank, which ends: the others need not wait for the deadline."""
    comm = start().split(0)
    comm.timeout = HANG
    call = summing(comm, how, Trap(signal.SIGINT))
    if comm.rank == WHO:
        expect(KeyboardInterrupt, call)
        say(comm, "named")
        sys.exit(3)
    expect(RankFailed, call, f"rank {comm.rank}:", f"rank {WHO}", "has left in the middle")
    say(comm, "named")
    stay((0, 2), "named")


def interrupted_and_stays(how):
    """It stays: the others are told at the deadline who is late; new communicators work."""
    comm = start()
    again = comm.split(0)
    again.timeout = HANG
    call = summing(comm, how, Trap(signal.SIGINT))
    if comm.rank == WHO:
        expect(KeyboardInterrupt, call)
    else:
        expect(
            CollectiveTimeout,
            call,
            "all ranks have arrived",
            f"rank {WHO} has not reached a barrier",
        )
    expect(CommunicatorBroken, comm.barrier, "broken since allreduce")
    x = again.empty(N)
    x[:] = comm.rank + 1
    again.allreduce(x, out=x, algorithm="symmetric")
    assert (x == comm.size * (comm.size + 1) / 2).all()
    usable(again)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])

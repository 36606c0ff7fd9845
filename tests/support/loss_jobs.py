"""Jobs that lose ranks and go on: under ``mpirun --with-ft ulfm``.

``loss_jobs.py NAME …``: each of its ranks says what it saw (`say` of failure_jobs.py), and
test_survivors.py reads it.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import numpy as np

import mpidist
from mpidist.errors import CollectiveTimeout, CommunicationError, RankFailed
from tests.support.failure_jobs import say, stay

DEADLINE = 30.0  # of every wait: a rank that is not lost comes by then
N = 1000


def die(how="kill"):
    """End this process, as if by accident."""
    sys.stdout.flush()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "segv":
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # Open MPI's handler prints a stack
        os.kill(os.getpid(), signal.SIGSEGV)
    os._exit(int(how.removeprefix("exit")))


def later(seconds=0.05):
    """End this process in a moment, wherever it is then."""
    timer = threading.Timer(seconds, die)
    timer.daemon = True
    timer.start()


def right(comm):
    """Everything works, and gives what it should."""
    p, r = comm.size, comm.rank
    x, s = np.full(7, r + 1.0), comm.empty(N)
    total = p * (p + 1) / 2
    for algorithm in ("native", "linear", "ring", "auto"):
        assert (comm.allreduce(x, algorithm=algorithm) == total).all()
    s[:] = r + 1
    comm.allreduce(s, out=s)
    assert (s == total).all()
    assert comm.allgather_object(r) == list(range(p))
    half = comm.split(r % 2)
    assert half.allreduce(1) == half.size
    half.free()
    comm.barrier()


def again(call):
    while True:
        call()


def ways(comm):
    """What a rank may be in when another one is lost, by name."""
    x, s, right, left = np.ones(N), comm.empty(N), (comm.rank + 1) % comm.size, comm.rank - 1
    s[:] = 1
    found = {
        name: partial(comm.allreduce, x, "max", out=np.empty(N), algorithm=name)
        for name in ("native", "staged", "single_copy", "ring", "linear")
    }
    sub, half = comm.split(0), comm.split(comm.rank % 2)
    found |= {
        "large": partial(comm.allreduce, np.ones(500_000), algorithm="ring"),
        "large native": partial(comm.allreduce, np.ones(500_000), algorithm="native"),
        "symmetric": partial(comm.allreduce, s, "max", out=s),
        "background": lambda: comm.iallreduce(x, algorithm="ring").wait(),
        "native background": lambda: comm.iallreduce(x, algorithm="native").wait(),
        "symmetric background": lambda: comm.iallreduce(s, "max", out=s).wait(),
        "barrier": comm.barrier,
        "broadcast": partial(comm.broadcast, x),
        "objects": partial(comm.allgather_object, {"rank": comm.rank}),
        "recv": partial(comm.recv, np.empty(3), left % comm.size),
        "recv from any": partial(comm.recv, np.empty(3), None),
        "irecv": lambda: comm.irecv(np.empty(3), right).wait(),
        "posted": lambda: comm.wait_all([comm.post_recv(np.empty(3), right)]),
        "sub": partial(sub.allreduce, x),
        "empty": lambda: comm.empty(10),
        "split": lambda: comm.split(0).free(),
        # Half of the ranks meet the loss in a call among themselves, the other half in the next.
        "half": lambda: [half.allreduce(x, algorithm="native"), comm.barrier()],
    }
    return found


def lose(comm, name, victim, how="kill"):
    """Lose a rank in one of the `ways`; return the communicator of the rest, which is checked."""
    call = ways(comm)[name]
    comm.barrier()
    if comm.rank == victim:
        later() if how == "kill" else die(how)
    before, expected = comm.size, [r for r in range(comm.size) if r != victim]
    try:
        again(call)
    except RankFailed as error:
        # Others may have gone on already, and left a communicator without the lost rank.
        places = {"half": ((victim,), (victim // 2,))}.get(name, ((victim,),))
        assert error.ranks in (*places, ()), error
        if how == "segv":
            assert "SIGSEGV" in str(error), error
    rest = comm.survivors()
    assert (rest.size, rest.rank) == (before - 1, expected.index(comm.rank))
    assert mpidist.init() is rest and comm.broken and not rest.broken
    right(rest)
    say(rest, name)
    return rest


def chain(*names):
    """Lose the last rank, the first and one in the middle in turn, each in another way."""
    comm = mpidist.init(timeout=DEADLINE)
    settings = comm.config
    for turn, name in enumerate(names):
        name, _, how = name.partition(":")
        victim = (comm.size - 1, 0, comm.size // 2)[turn % 3]
        comm = lose(comm, name.replace("-", " "), victim, how or "kill")
    assert comm.config == settings and comm.timeout == DEADLINE
    say(comm, f"left {comm.size}")
    comm.barrier()  # mpirun counts a rank that ended by an exit code twice, and may end too soon


def two_at_once():
    comm = mpidist.init(timeout=DEADLINE)
    comm.barrier()
    if comm.rank in (0, 3):
        later()
    try:
        again(partial(comm.allreduce, np.ones(N), algorithm="ring"))
    except RankFailed as error:
        assert {*error.ranks} <= {0, 3}, error
    if comm.rank in (0, 3):
        time.sleep(DEADLINE)  # on a loaded machine its end may come late
    rest = comm.survivors()
    right(rest)
    say(rest, f"left {rest.size}")


def inside_recovery(where):
    """Another rank dies while the rest go on: in a meeting, in the set-up, or at its end."""
    comm = mpidist.init(timeout=DEADLINE)
    comm.barrier()
    if comm.rank == 1:
        later(0.02)
    try:
        again(comm.barrier)
    except RankFailed:
        pass
    if comm.rank == 3:
        places = {"meeting": ("agree", 1), "made": ("agree", 2), "end": ("agree", 3)}
        die_in(*places.get(where, ("shrink", 1)))
    rest = comm.survivors()
    assert rest.size == comm.size - 2
    right(rest)
    say(rest, f"left {rest.size}")


def die_in(name, calls):
    """Die at a call of this function of ulfm: behind shrink, in front of agree."""
    from mpidist.backends import ulfm  # not before init: it starts MPI, with its own settings

    function, left = getattr(ulfm, name), [calls]

    def deadly(*arguments):
        result = function(*arguments) if name == "shrink" or left[0] > 1 else None
        left[0] -= 1
        if not left[0]:
            die()
        return result

    setattr(ulfm, name, deadly)


def in_split():
    """Ranks die in the library's call that makes a communicator, or in the set-up behind it."""
    comm = mpidist.init(timeout=DEADLINE)
    for microseconds in (None, 0, 30, 60, 100, 200):
        comm.barrier()
        victim = comm.size // 2
        if comm.rank == victim:
            die_in_part(microseconds)
        split = partial(comm.split, 0 if comm.rank else None)
        try:
            again(split)
        except RankFailed as error:
            assert error.ranks in ((victim,), ()), error
        comm = comm.survivors()
        right(comm)
    say(comm, f"left {comm.size}")


def beside_split():
    """A part that the lost rank was not in stays usable, after a split of all that it died in."""
    comm = mpidist.init(timeout=DEADLINE)
    rest = comm.split(0 if comm.rank < 3 else 1)
    comm.barrier()
    if comm.rank == 3:
        die_in_part(0)
    try:
        again(partial(comm.split, 0))
    except RankFailed as error:
        assert error.ranks in ((3,), ()), error
    right(rest)
    say(rest, "right")
    os._exit(0)


def die_in_part(microseconds):
    """Die so long after this rank comes to ulfm.part; None is for the set-up behind it."""
    from mpidist.backends import mpi, ulfm  # not before init: it starts MPI, with its own settings

    if microseconds is None:
        mpi.MpiBackend._make_board = lambda *_: die()
    part = ulfm.part

    def deadly(*arguments):
        if microseconds == 0:
            die()
        signal.setitimer(signal.ITIMER_REAL, (microseconds or 0) * 1e-6)
        return part(*arguments)

    ulfm.part = deadly


def stopped_in_shrink():
    """Others fail, and say so, while one is still making the communicator of the rest."""
    comm = mpidist.init(timeout=DEADLINE)
    from mpidist.backends import mpi, ulfm

    shrink, set_up, failed = ulfm.shrink, mpi.MpiBackend._over_survivors, []

    def stopped(*arguments):
        steps = f"sleep(0.002), kill({os.getpid()}, 19), sleep(0.3), kill({os.getpid()}, 18)"
        code = f"from os import kill; from time import sleep; {steps}"
        subprocess.Popen([sys.executable, "-S", "-c", code])
        time.sleep(0.012)
        return shrink(*arguments)

    def failing(*arguments):
        if not failed:
            failed.append(True)
            raise CommunicationError("of the test")
        return set_up(*arguments)

    if comm.rank == 2:
        ulfm.shrink = stopped
    else:
        mpi.MpiBackend._over_survivors = failing
    if comm.rank == 3:
        die()
    try:
        again(comm.barrier)
    except RankFailed:
        pass
    rest = comm.survivors()
    right(rest)
    say(rest, f"left {rest.size}")


def of_a_part():
    """The survivors of a part go on, and those of all: the part of before stays usable."""
    comm = mpidist.init(timeout=DEADLINE)
    odd = comm.split(comm.rank % 2)
    comm.barrier()
    if comm.rank == 3:
        die()
    if comm.rank % 2:
        try:
            again(odd.barrier)
        except RankFailed as error:
            assert error.ranks == (1,), error
        mine = odd.survivors()
        assert mine.size == odd.size - 1
        right(mine)
    rest = comm.survivors()
    right(rest)
    if comm.rank % 2:
        right(mine)
    say(rest, f"left {rest.size}")


def one_does_not_come():
    """A rank that is alive and never calls it: the others name it at the deadline."""
    comm = mpidist.init(timeout=5.0)
    comm.barrier()
    if comm.rank == 1:
        die()
    if comm.rank == 2:
        stay((0, 3), "named")
        os._exit(0)
    try:
        again(comm.barrier)
    except RankFailed as error:
        assert error.ranks == (1,), error
    try:
        comm.survivors()
    except CollectiveTimeout as error:
        assert error.missing == (2,) and "survivors" in str(error), error
        say(comm, "named")
    stay((0, 3), "named")
    os._exit(0)


def one_has_ended():
    """A rank that ended well before the loss does not come, and is named at once."""
    comm = mpidist.init(timeout=DEADLINE)
    comm.barrier()
    if comm.rank == 0:
        return
    if comm.rank == 2:
        later(0.5)
    try:
        again(comm.barrier)
    except RankFailed:
        pass
    if comm.rank == 2:
        time.sleep(DEADLINE)
    begun = time.monotonic()
    try:
        comm.survivors()
    except CommunicationError as error:
        assert "rank 0 has ended already" in str(error), error
        assert time.monotonic() < begun + DEADLINE / 2
        say(comm, "named")
    stay((1, 3), "named")
    os._exit(0)


def much_later():
    """What follows has deadlines of its own, not that of survivors()."""
    comm = mpidist.init(timeout=4.0)
    comm.barrier()
    if comm.rank == 2:
        die()
    try:
        again(comm.barrier)
    except RankFailed:
        rest = comm.survivors()
    time.sleep(5.0)
    right(rest)
    say(rest, f"left {rest.size}")


def many_losses():
    """Open files, threads and mappings of a rank stay as many, however often ranks are lost."""
    comm = mpidist.init(timeout=DEADLINE)
    counts = []
    while comm.size > 2:
        comm.barrier()
        if comm.rank == comm.size - 1:
            die()
        try:
            again(comm.barrier)
        except RankFailed:
            comm = comm.survivors()
        right(comm)
        gc.collect()
        counts.append([len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task")])
        with open("/proc/self/maps") as maps:
            counts[-1].append(sum("mpidist" in line and ".so" not in line for line in maps))
    assert all(now <= first + 2 for now, first in zip(counts[-1], counts[0])), counts
    say(comm, f"left {comm.size}")


def nobody_goes_on():
    comm = mpidist.init(timeout=DEADLINE)
    comm.barrier()
    if comm.rank == 1:
        later()
    again(comm.barrier)


def unsupported():
    comm = mpidist.init(timeout=DEADLINE)
    try:
        comm.survivors()
    except mpidist.Unsupported as error:
        assert f"rank {comm.rank}: " in str(error) and "mpidist run --survive" in str(error), error
    else:
        raise AssertionError("no Unsupported")
    right(comm)
    say(comm, "unsupported")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])

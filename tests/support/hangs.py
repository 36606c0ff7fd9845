"""Jobs that hang, one kind each: ``mpidist run -n N hangs.py KIND FOLDER``.

Rank ODD is in the function KIND, at a line marked "odd"; all others wait for it.  What FOLDER says
ends most kinds, and the job then ends well: so a look at the ranks has disturbed nothing.
"""

import asyncio
import atexit
import ctypes
import fcntl
import functools
import multiprocessing
import os
import pdb
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np

import mpidist

ODD = 1
# The exit codes of jobs that do not end well: by their deadline, or as the program says.
ENDS = {"endless_c_loop": 1, "receive": 1, "send": 1, "order": 1, "bare_mpi": 3, "at_exit": 1}
ENDS |= {"thread_at_exit": 1}
BEGIN_LATER = "loader", "in_pytest"
BY_DEADLINE = "endless_c_loop", "receive", "send", "order"
ALONE, TOGETHER = {}, {}  # kinds, by name: functions of the odd rank, and of all ranks
FOLDER = sys.argv[-1]
RELEASED, FIFO = f"{FOLDER}/released", f"{FOLDER}/fifo"


def released():
    return os.path.exists(RELEASED)


def wait():
    while not released():
        time.sleep(0.02)


def when_released(action):
    def act():
        wait()
        action()

    threading.Thread(target=act, daemon=True).start()


def begin():
    """What follows is the hang: a roll call before is of a rank that is slow here."""
    comm.barrier()
    if comm.rank == ODD:
        open(f"{FOLDER}/begun", "w", encoding="ascii").close()


def alone(kind):
    ALONE[kind.__name__] = kind
    return kind


def together(kind):
    TOGETHER[kind.__name__] = kind
    return kind


@alone
def late():
    wait()  # odd


@alone
def python_loop():
    while not released():  # odd
        pass  # odd


@alone
def c_loop():
    while not released():  # odd
        sum(range(5_000_000))  # odd: holds the interpreter's lock


@alone
def endless_c_loop():
    re.match("(a+)+$", "a" * 60 + "b")  # odd


@alone
def c_wait():
    while not released():  # odd
        ctypes.CDLL(None).usleep(100_000)  # odd


@alone
def interpreter_lock():
    """Another thread waits in C, and holds it."""
    hold = threading.Thread(target=ctypes.PyDLL(None).open, args=(FIFO.encode(), os.O_RDONLY))
    hold.start()  # odd
    wait()  # odd


@alone
def lock():
    one = threading.Lock()
    one.acquire()
    when_released(one.release)
    one.acquire()  # odd


@alone
def prefetched():
    batches = queue.Queue()
    when_released(lambda: batches.put(1))
    batches.get()  # odd


@alone
def event_loop():
    async def fetch():
        while not released():
            await asyncio.sleep(0.02)

    asyncio.run(fetch())  # odd


@alone
def importing():
    with open(f"{FOLDER}/slow_module.py", "w", encoding="ascii") as file:
        file.write("from __main__ import wait\nwait()\n")
    sys.path.insert(0, FOLDER)
    import slow_module  # noqa: F401  # odd


@alone
def file_system():
    with open(FIFO, "rb") as file:  # odd
        file.read()


@alone
def uninterruptible():
    """The kernel lets nobody disturb who waits for a child that has not yet got its program."""
    redirected = [(os.POSIX_SPAWN_OPEN, 0, FIFO, os.O_RDONLY, 0)]
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=redirected)  # odd


@alone
def full_disk():
    while not released():  # odd
        try:
            with open("/dev/full", "wb", buffering=0) as file:  # odd
                file.write(bytes(8))  # odd
        except OSError:
            time.sleep(0.02)  # odd


@alone
def unreachable():
    while not released():  # odd
        try:
            socket.create_connection(("127.0.0.1", 9)).close()  # odd: nobody listens there
        except OSError:
            time.sleep(0.5)  # odd


@alone
def accept():
    with socket.create_server(("127.0.0.1", 0)) as server:
        when_released(lambda: socket.create_connection(server.getsockname()))
        server.accept()  # odd


@alone
def child():
    loop = "while not os.path.exists(sys.argv[1]): pass"
    subprocess.run([sys.executable, "-c", f"import os, sys\n{loop}", RELEASED])  # odd


@alone
def pool():
    with multiprocessing.get_context("fork").Pool(1) as workers:
        workers.apply(wait)  # odd


@alone
def stopped():
    os.kill(os.getpid(), signal.SIGSTOP)  # odd


@alone
def debugger():
    commands, wanted = os.pipe()
    when_released(lambda: os.write(wanted, b"continue\n"))
    with open(commands, encoding="ascii") as stdin, open(os.devnull, "w", encoding="ascii") as out:
        pdb.Pdb(stdin=stdin, stdout=out, nosigint=True, readrc=False).set_trace()  # odd
        time.sleep(0)  # odd


@alone
def at_exit():
    """The program has left, and sends its results."""
    atexit.register(upload)
    sys.exit(0)


def upload():
    wait()  # odd: at_exit


@alone
def thread_at_exit():
    """The program has left, and one of its threads has not."""
    threading.Thread(target=serve).start()
    sys.exit(0)


def serve():
    wait()  # odd: thread_at_exit


@alone
def receive():
    comm.recv(np.empty(4), 0)  # odd


@alone
def send():
    comm.send(np.ones(5_000_000), 0)  # odd


@together
def most():
    """Only the last rank is where all should be."""
    if comm.rank < comm.size - 1:
        wait()  # odd


@together
def order():
    part = comm.split(0)
    first, second = (comm, part) if comm.rank == ODD else (part, comm)
    first.barrier()  # odd
    second.barrier()


@together
def background():
    if comm.rank == ODD:
        wait()  # odd
    comm.iallreduce(np.ones(4)).wait()


@together
def file_lock():
    file = open(f"{FOLDER}/lock", "w", encoding="ascii")  # noqa: SIM115
    if comm.rank == 0:
        fcntl.flock(file, fcntl.LOCK_EX)
        when_released(functools.partial(fcntl.flock, file, fcntl.LOCK_UN))
    comm.barrier()
    if comm.rank == ODD:
        fcntl.flock(file, fcntl.LOCK_EX)  # odd


@together
def bare_mpi():
    from mpi4py import MPI

    when_released(lambda: os._exit(3))
    if comm.rank == ODD:
        MPI.COMM_WORLD.recv(source=0)  # odd
    MPI.COMM_WORLD.Barrier()


@together
def loader():
    class Data(list):
        def __getitem__(self, index):
            wait()
            return index

    if comm.rank == ODD:
        from torch.utils.data import DataLoader

        batches = iter(DataLoader(Data([1, 2]), num_workers=1, multiprocessing_context="fork"))
    begin()
    if comm.rank == ODD:
        next(batches)  # odd


@together
def in_pytest():
    import pytest

    plain = "-q", "-p", "no:cacheprovider", "-o", "python_functions=checked_step"
    assert not pytest.main([*plain, f"{__file__}::checked_step", FOLDER])


def checked_step():
    from __main__ import ODD, begin, comm, wait

    begin()
    if comm.rank == ODD:
        wait()  # odd: in_pytest
    comm.barrier()


KINDS = [*ALONE, *TOGETHER]


def lines_of(kind):
    """Return the lines at which the odd rank of a kind may be."""
    function, found = "", set()
    with open(__file__, encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            if text.startswith("def "):
                function = text[4:].partition("(")[0]
            if "  # odd" in text:
                whose = re.search(r"# odd: (\w+)$", text)
                name = whose[1] if whose and whose[1] in KINDS else function
                found |= {(function, number)} if name == kind else set()
    return found


if __name__ == "__main__":
    comm = mpidist.init()
    if sys.argv[1] not in BEGIN_LATER:
        begin()
    if comm.rank == ODD or sys.argv[1] in TOGETHER:
        (ALONE | TOGETHER)[sys.argv[1]]()
    comm.barrier()

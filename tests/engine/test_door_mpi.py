"""Only its own process enters a communicator, and one caller at a time."""

import os
import signal
import sys
import threading
import time

import numpy as np
import pytest

import mpidist
from mpidist.engine.work import Work
from mpidist.errors import CommunicatorBroken, CommunicatorInUse

N = 1000
X = np.ones(4)
ENTRIES = {
    "allreduce": lambda c, held: c.allreduce(X),
    "repeated": lambda c, held: c.allreduce(held["x"], out=held["x"]),
    "reduce": lambda c, held: c.reduce(X),
    "broadcast": lambda c, held: c.broadcast(X.copy()),
    "allgather": lambda c, held: c.allgather(X),
    "gather": lambda c, held: c.gather(X),
    "reduce_scatter": lambda c, held: c.reduce_scatter(np.ones(60)),
    "scatter": lambda c, held: c.scatter(np.ones(60), out=np.ones(60 // c.size)),
    "alltoall": lambda c, held: c.alltoall(np.ones(60)),
    "barrier": lambda c, held: c.barrier(),
    "iallreduce": lambda c, held: c.iallreduce(X),
    "allgather_object": lambda c, held: c.allgather_object(1),
    "split": lambda c, held: c.split(0),
    "create_group": lambda c, held: c.create_group(range(c.size)),
    "free": lambda c, held: c.free(),
    "send_object": lambda c, held: c.send_object(1, (c.rank + 1) % c.size),
    "send": lambda c, held: c.send(X, (c.rank + 1) % c.size),
    "irecv": lambda c, held: c.irecv(X.copy(), (c.rank + 1) % c.size),
    "post_recv": lambda c, held: c.post_recv(X.copy(), (c.rank + 1) % c.size),
    "wait": lambda c, held: held["work"].wait(),
    "test": lambda c, held: held["work"].test(),
}


@pytest.fixture
def own(comm):
    """A communicator of all ranks, and what some entries need, begun before."""
    made = comm.split(0)
    held = {"x": np.zeros(4)}
    for _ in range(3):  # bound, and found by its array
        made.allreduce(held["x"], out=held["x"])
    late = [comm.size > 1 and made.irecv(np.empty(1), (made.rank - 1) % made.size, 9)]
    held["work"] = late[0] or mpidist.Communicator(comm.backend.split(0, 0)).ibarrier()
    yield made, held
    if comm.size > 1 and made.broken is None:
        made.send(np.ones(1), (made.rank + 1) % made.size, 9)
        late[0].wait()


def entries(comm):
    needs_peer = ("send_object", "send", "irecv", "post_recv", "wait", "test")
    return {k: v for k, v in ENTRIES.items() if comm.size > 1 or k not in needs_peer}


@pytest.mark.parametrize("background", [False, True])
def test_an_operation_that_calls_its_communicator_is_refused(comm, own, background):
    made, held = own
    refused = {}

    def add(left, right):
        for name, enter in entries(comm).items():
            try:
                enter(made, held)
            except CommunicatorInUse as error:
                refused[name] = str(error)
        return left + right

    x = np.arange(N) + 1.0 + comm.rank
    op = mpidist.Op(add, commute=True)
    got = made.iallreduce(x, op=op).wait() if background else made.allreduce(x, op=op)
    assert (got == comm.size * (np.arange(N) + 1.0) + sum(range(comm.size))).all()
    if comm.size > 1:  # else nothing is combined
        assert comm.allreduce(len(refused)) > 0
    for name, text in refused.items():
        # In the background any thread of this process may combine, such as that of a store.
        assert f"rank {comm.rank}: " in text, name
        assert " inside " in text or (background and " while thread " in text), name
        assert text.count(os.path.basename(__file__)) == 2, text  # both places
    assert not refused or refused.keys() == entries(comm).keys()
    assert made.allreduce(1) == comm.size  # none of them has begun anything


def test_a_second_thread_is_refused(comm, own):
    if comm.size == 1:
        pytest.skip("needs at least 2 ranks")
    made, held = own
    refused = {}

    def other():
        while made._service.sequencer.door._tokens:  # until the first thread is inside
            time.sleep(1e-3)
        for name, enter in entries(comm).items():
            try:
                enter(made, held)
            except CommunicatorInUse as error:
                refused[name] = str(error)
        comm.send(np.ones(1), 1, 3)

    if comm.rank == 0:
        thread = threading.Thread(target=other, name="the other")
        thread.start()
        made.barrier()  # rank 1 comes when the thread has tried everything
        thread.join()
        assert refused.keys() == entries(comm).keys()
        for name, text in refused.items():
            assert "rank 0" in text and "'the other'" in text and "barrier" in text, name
            assert text.count(os.path.basename(__file__)) == 2, text
    else:
        if comm.rank == 1:
            comm.recv(np.empty(1), 0, 3)
        made.barrier()
    assert made.allreduce(1) == comm.size


def test_threads_that_take_turns_are_served(comm, own):
    made, _ = own
    for k in range(3):
        got: list[int] = []
        thread = threading.Thread(target=lambda got=got: got.append(made.allreduce(1)))
        thread.start()
        thread.join()
        assert got == [comm.size] and made.allreduce(k) == k * comm.size


@pytest.mark.parametrize("messages", [False, True])
def test_what_one_thread_waits_for_another_polls(comm, messages):
    """A wait polls what its thread has begun on other communicators, at any moment."""
    if comm.size == 1:
        pytest.skip("needs at least 2 ranks")
    made, failed, peer = comm.split(0), [], comm.rank ^ 1

    def wait(works):
        try:
            for work in works:
                work.wait()
        except Exception as error:
            failed.append(error)

    for k in range(40):
        receives = peer < comm.size and (comm.rank + k) % 2
        arrays = [np.zeros(100_000) for _ in range(3)]
        if not messages:
            works = [made.iallreduce(np.full_like(x, k), out=x) for x in arrays]
        else:
            works = [made.irecv(x, peer, tag) for tag, x in enumerate(arrays) if receives]
        thread = threading.Thread(target=wait, args=[works])
        thread.start()
        for turn in range(20):
            if messages and turn == 10 and peer < comm.size and not receives:
                works = [made.isend(np.full_like(x, k), peer, tag) for tag, x in enumerate(arrays)]
            assert comm.allreduce(1) == comm.size
        thread.join()
        wait(works)
        assert not failed
        if receives or not messages:
            assert all((x == (k if messages else k * comm.size)).all() for x in arrays)


def test_a_thread_that_ended_leaves_receives_to_the_others(comm):
    """Long messages arrive in two steps; any wait, such as the sender's, polls the second."""
    made = comm.split(0)
    made.timeout = 30
    sent = made.isend(np.ones(1), made.rank)
    thread = threading.Thread(target=lambda: made.irecv(np.zeros(1), made.rank).wait())
    thread.start()
    thread.join()
    work = made.irecv(np.zeros(100_000), made.rank)
    made.isend(np.ones(100_000), made.rank).wait()
    assert sent.test() and (work.wait() == 1).all()


def test_an_interrupt_at_the_entry_leaves_the_door_usable(comm, own):
    """KeyboardInterrupt may strike between the entry and the block that leaves."""
    made, _ = own

    def struck():
        token = made._service.sequencer.door.take()
        assert token
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        struck()
    del caught
    assert made.allreduce(1) == comm.size
    assert made.allreduce(2) == 2 * comm.size


def test_a_handler_is_refused_wherever_it_interrupts(comm, own):
    """Also within a poll, whose frames are shallow."""
    if comm.size == 1:
        pytest.skip("needs at least 2 ranks")
    made, held = own
    got = []

    def handler(_, frame):
        inside = False
        while frame is not None and not inside:
            inside, frame = frame.f_code is Work.poll.__code__, frame.f_back
        try:
            made.iprobe(None, 9)
            got.append((inside, "entered"))
        except CommunicatorInUse:
            got.append((inside, "refused"))

    before = signal.signal(signal.SIGALRM, handler)
    try:
        limit = time.monotonic() + 60
        while got.count((True, "refused")) < 500 and time.monotonic() < limit:
            # One at a time: on a loaded machine a handler takes longer than any interval.
            tried = len(got)
            signal.setitimer(signal.ITIMER_REAL, 1e-5)
            while len(got) == tried:
                held["work"].test()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert (True, "entered") not in got
    assert got.count((True, "refused")) >= 500
    assert made.allreduce(1) == comm.size


@pytest.mark.parametrize("algorithm", ["staged", "ring", "native"])
def test_a_repeated_call_leaves_a_closed_door_closed(comm, own, algorithm):
    """What broke the communicator while it ran may be found by another thread alone."""
    if comm.size == 1 or comm.size > 2 and algorithm == "native":
        # Of many ranks MPI does not combine on each.
        pytest.skip("needs exactly 2 ranks" if comm.size > 2 else "needs at least 2 ranks")
    made, _ = own
    door, x, closing = made._service.sequencer.door, np.zeros(4 * comm.size), []

    def add(left, right):
        if closing:
            door.close("another thread found it broken")
        return left + right

    op = mpidist.Op(add, commute=True)
    for _ in range(5):
        made.allreduce(x, op=op, out=x, algorithm=algorithm)
    closing.append(True)
    made.allreduce(x, op=op, out=x, algorithm=algorithm)
    assert door.broken is not None
    for _ in range(2):
        with pytest.raises(CommunicatorBroken, match="another thread found it broken"):
            made.allreduce(x, op=op, out=x, algorithm=algorithm)
    comm.barrier()


def test_a_forked_child_is_refused(comm, own):
    made, held = own
    out, back = os.pipe()
    child = os.fork()
    if not child:
        try:
            wrong = []
            for name, enter in entries(comm).items():
                try:
                    enter(made, held)
                    if name == "free":  # of a broken communicator: nothing to do
                        continue
                    wrong.append(f"{name} returned")
                except CommunicatorBroken as error:
                    if str(os.getppid()) not in str(error) or "forked" not in str(error):
                        wrong.append(f"{name}: {error}")
                except BaseException as error:
                    wrong.append(f"{name}: {error!r}")
            try:
                mpidist.init()
                wrong.append("init returned")
            except mpidist.LaunchError as error:
                wrong += [] if "forked" in str(error) else [str(error)]
            os.write(back, "; ".join(wrong).encode())
        finally:
            os._exit(0)
    os.close(back)
    said = b""
    while part := os.read(out, 65536):
        said += part
    os.close(out)
    os.waitpid(child, 0)
    assert said == b""
    assert made.allreduce(1) == comm.size == comm.allreduce(1)


if __name__ == "__main__":  # a job of tests/engine/test_door.py
    how, trace = sys.argv[1:]
    comm = mpidist.init(timeout=20)
    if trace != "-":
        comm.trace(trace)
    comm.allreduce(np.ones(4))
    if comm.rank == 1:
        child = os.fork()
        if not child:
            if how == "exit":
                exit(7)
            if how == "sys.exit":
                sys.exit(7)
            if how == "raise":
                raise ValueError("in the child")
            sys.exit()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(1, f"status {status}\n".encode())  # the lines of two ranks stay whole
    comm.barrier()
    os.write(1, f"sum {comm.allreduce(1)}\n".encode())

"""Plays drawn sequences on one rank, and notes everything that is not as it must be."""

from __future__ import annotations

import os
import time
from collections import Counter

import numpy as np
from mpi4py import MPI

from mpidist import CollectiveConfig, Communicator
from mpidist.backends.mpi import MpiBackend
from mpidist.errors import Unsupported
from mpidist.topology import pretended_hosts
from tests.support.sequence_cases import JOINING, Case, alike
from tests.support.sequence_memory import POOL, Arrays, Memory, torch, undisguised
from tests.support.sequence_steps import Call, Renew, Settle, Traffic


class Player:
    """One rank in one sequence: communicators and memory of its own, and what is under way.

    Attributes
    ----------
    counts : Counter
        How often each way served a call, and what else was done.
    wrong : list of str
        What was not as it must be.
    """

    def __init__(self, timeout: float):
        self.counts: Counter = Counter()
        self.wrong: list[str] = []
        self.timeout, self.plain = timeout, MPI.COMM_WORLD.Dup()
        hosts = pretended_hosts(MPI.COMM_WORLD.size, os.environ)
        backend = MpiBackend(MPI.COMM_WORLD, hosts)
        world = Communicator(backend, CollectiveConfig(timeout=timeout))
        twin = world.split(0, key=-world.rank)  # the same ranks in reverse order
        half = world.split(world.rank % 2)
        self.comms = {"world": world, "twin": twin, "half": half}
        self.memory = Memory()
        self.pending: list = []  # (places in use, work, check)
        self.messages: list = []
        self.step = "the beginning"
        self.symmetric = world.topology.num_nodes == 1
        for name in self.comms if self.symmetric else ():
            for which in ("x", "out"):
                self._take(name, which, POOL)

    def play(self, sequence: list) -> None:
        """Play to the end: a wrong result must not keep the other ranks waiting."""
        for number, step in enumerate(sequence):
            self.step = f"step {number}: {step}"
            getattr(self, f"_{type(step).__name__.lower()}")(step)
        self.step = "the end"
        self._settle(Settle(0))
        self._receive()
        for comm in reversed(self.comms.values()):
            comm.free()
        self.plain.Free()

    def _note(self, right: bool, text: str) -> None:
        if not right:
            self.wrong.append(f"{text}, in {self.step}")

    # -- steps other than calls -----------------------------------------------------------------

    def _settle(self, step: Settle) -> None:
        for k in np.random.default_rng(step.seed).permutation(len(self.pending)):
            _, work, check = self.pending[int(k)]
            check(work.wait())
        self.pending = []

    def _free_of_work(self, *places) -> None:
        if any(place in busy for busy, _, _ in self.pending for place in places):
            self._settle(Settle(0))

    def _traffic(self, step: Traffic) -> None:
        rank, size = self.plain.rank, self.plain.size
        to, source = (rank + step.distance) % size, (rank - step.distance) % size
        here, there = np.full(step.n, rank, "i4"), np.empty(step.n, "i4")
        requests = [self.plain.Irecv(there, source), self.plain.Isend(here, to)]
        self.messages.append((requests, there, source, here))
        self.counts["messages"] += 1
        if len(self.messages) > 3:
            self._receive()

    def _receive(self) -> None:
        until = time.monotonic() + self.timeout
        for requests, there, source, _ in self.messages:
            while not MPI.Request.Testall(requests):
                if time.monotonic() > until:
                    raise TimeoutError(f"the message of rank {source} has not come")
                os.sched_yield()
            self._note((there == source).all(), f"the message of rank {source} is another")
        self.messages = []

    def _renew(self, step: Renew) -> None:
        if not self.symmetric:
            return
        place = (step.comm, step.which)
        self._free_of_work(place)
        old = self.memory.pieces.pop(place)
        if step.free:
            self.comms[step.comm].free(old)
        del old
        self._take(*place, step.n)
        self.counts["renewed"] += 1

    def _take(self, name: str, which: str, n: int) -> None:
        made = self.comms[name].empty(n, "uint8")
        self._note(not made.any(), "memory that comm.empty() gave is not zero")
        self.memory.pieces[name, which] = made

    # -- calls ----------------------------------------------------------------------------------

    def _call(self, step: Call) -> None:
        comm = self.comms[step.comm]
        case = Case(step, comm.rank, comm.size)
        arrays = self.memory.arrays(case)
        self._free_of_work(*arrays.places)
        name = self._way(comm, step)
        for again in range(1 if step.background else step.repeat):
            salt = step.salt + again
            arrays.fill(None if case.only_receives else case.data(salt))
            if step.delay.rank % comm.size == comm.rank:
                spin(step.delay.microseconds)
            try:
                given = self._make(comm, case, name, arrays)
            except Unsupported:  # on every rank, or the next call shows that it was not
                self.counts["refused"] += 1
                return
            self.counts[f"{'i' * step.background}{name}"] += 1
            if torch is not None:
                self.counts["tensors"] += isinstance(arrays.given_x, torch.Tensor)
            if not step.background:
                self._check(case, arrays, given, salt)
                continue
            self.pending.append(
                (arrays.places, given, lambda got, s=salt: self._check(case, arrays, got, s))
            )
            if len(self.pending) > 5:
                self._settle(Settle(step.salt))

    @staticmethod
    def _way(comm: Communicator, step: Call) -> str:
        if isinstance(step.way, str):
            return step.way
        names = [way.name for way in comm.explain(step.collective, 64)[1]]
        return names[step.way % len(names)]

    @staticmethod
    def _make(comm: Communicator, case: Case, name: str, arrays: Arrays):
        step = case.call
        call = getattr(comm, "i" * step.background + step.collective)
        options: dict = {"algorithm": name}
        if step.collective == "barrier":
            return call(**options)
        if step.collective in ("allreduce", "reduce", "reduce_scatter"):
            options["op"] = case.op
        if step.collective in ("reduce", "broadcast", "gather", "scatter"):
            options["root"] = case.root
        if case.shape.counts is not None:
            options["counts"] = case.shape.counts
        no_part = step.collective in ("reduce", "gather") and case.rank != case.root
        return call(arrays.given_x, out=None if no_part else arrays.given_out, **options)

    def _check(self, case: Case, arrays: Arrays, got, salt: int) -> None:
        self._note(arrays.edges_hold(), "memory beside an array was written to")
        expected = case.expected(salt)
        if expected is None:
            self._note(got is None, f"{got!r} was given where nothing is to be given")
        else:
            if case.scalar and case.call.collective not in JOINING:
                expected = expected.reshape(())
            self._check_kind(case, arrays, got)
            got = undisguised(got)
            right = alike(got, expected, case.op, case.size)
            self._note(right, f"got {got!r}, expected {expected!r}")
        written = got is not None and np.may_share_memory(arrays.x, got)
        if not case.only_receives and not written:
            same = arrays.x.tobytes() == case.data(salt).tobytes()
            self._note(same, "the input was changed")

    def _check_kind(self, case: Case, arrays: Arrays, got) -> None:
        """Note where what was given to be filled is not what is returned; tensors for tensors."""
        kept = arrays.given_out
        if kept is None and case.call.collective == "broadcast":
            kept = arrays.given_x
        if kept is not None:
            self._note(got is kept, f"got {got!r}, and not the object that was to be filled")
        elif torch is not None:
            wanted = isinstance(arrays.given_x, torch.Tensor)
            right = isinstance(got, torch.Tensor) == wanted
            self._note(right, f"got a {type(got).__name__} for a {type(arrays.given_x).__name__}")


def spin(microseconds: int) -> None:
    """Come later, and let others have the core meanwhile."""
    until = time.perf_counter() + microseconds / 1e6
    while time.perf_counter() < until:
        os.sched_yield()

"""Every rank tells every other rank something, with a deadline.

Over a duplicate of COMM_WORLD, so that a test which leaves messages behind cannot disturb it, and
point to point, so that a rank that does not come can be named.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import time

STACKS = signal.SIGUSR1  # makes a rank show its stacks, wherever it is


class Missing(Exception):
    """Some ranks did not come in time."""

    def __init__(self, ranks: list[int], seconds: float):
        self.ranks, self.seconds = ranks, seconds
        super().__init__(f"rank {', '.join(map(str, ranks))} did not come within {seconds:g} s")


class Exchange:
    """The duplicate of COMM_WORLD, and what is known of the other ranks."""

    def __init__(self):
        from mpi4py import MPI

        self.MPI = MPI
        self.comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self.comm.rank, self.comm.size
        self.others = [peer for peer in range(self.size) if peer != self.rank]
        self.ordinal = 0
        # pytest redirects descriptor 2 while a test runs: keep the real one.
        self.stderr = os.fdopen(os.dup(sys.__stderr__.fileno()), "w", buffering=1)
        faulthandler.register(STACKS, file=self.stderr, all_threads=True)
        self.places = self.everyone((os.uname().nodename, os.getpid()), 60)

    def describe(self) -> str:
        vendor, version = self.MPI.get_vendor()
        return f"{vendor} {'.'.join(map(str, version))}"

    def everyone(self, value: object, limit: float) -> list:
        """Give `value`, get those of all ranks in rank order; after `limit` s raise `Missing`."""
        MPI, data = self.MPI, pickle.dumps(value)
        self.ordinal += 1
        tag = self.ordinal % 32749  # below the smallest upper bound that MPI promises
        sends = [self.comm.Isend([data, MPI.BYTE], peer, tag) for peer in self.others]
        got, begin, spins = {self.rank: value}, time.monotonic(), 0
        while len(got) < self.size or not MPI.Request.Testall(sends):
            came = len(got)
            for peer in self.others:
                if peer not in got:
                    self._take(peer, tag, got)
            if time.monotonic() - begin > limit:
                raise Missing([p for p in self.others if p not in got], limit)
            spins = 0 if len(got) > came else spins + 1
            if spins < 200:
                os.sched_yield()
            else:
                time.sleep(0.0002)
        return [got[rank] for rank in range(self.size)]

    def _take(self, peer: int, tag: int, got: dict) -> None:
        status = self.MPI.Status()
        message = self.comm.Improbe(peer, tag, status)
        if message is not None:
            data = bytearray(status.Get_count(self.MPI.BYTE))
            message.Recv([data, self.MPI.BYTE])
            got[peer] = pickle.loads(data)

    def speaks(self, missing: list[int]) -> bool:
        """Whether this rank is the lowest of those that are there."""
        return all(rank in missing for rank in range(self.rank))

    def give_up(self, why: str, missing: list[int]) -> None:
        """Say why, let the missing ranks show their stacks, and end the job on all ranks."""
        if not self.speaks(missing):
            time.sleep(10)  # the one that speaks ends this rank too
        self.stderr.write(f"\nrank {self.rank}: {why}\n")
        for peer in missing:
            node, pid = self.places[peer]
            if node != os.uname().nodename:
                continue
            self.stderr.write(f"rank {self.rank}: the stacks of rank {peer} (process {pid}):\n")
            time.sleep(0.2)  # for mpiexec to pass this on before them
            try:
                os.kill(pid, STACKS)
            except ProcessLookupError:
                self.stderr.write(f"rank {self.rank}: process {pid} is no more\n")
            time.sleep(0.5)
        time.sleep(0.5)  # for mpiexec to pass on what was written
        if "MPI_LOCALNRANKS" in os.environ:  # MPICH's mpiexec: see MpiBackend.abort
            os.kill(os.getpid(), signal.SIGKILL)
        self.MPI.COMM_WORLD.Abort(70)

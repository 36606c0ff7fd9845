"""A library in the place of NCCL, on the emulated device: its ranks are threads."""

import ctypes

import ml_dtypes
import numpy as np

from mpidist.device.find import find_device
from mpidist.gpu.nccl.backend import DTYPES, OPS

NUMPY = {code: np.dtype(ml_dtypes.bfloat16 if n == "bfloat16" else n) for n, code in DTYPES.items()}
NAMES = {code: name for name, code in OPS.items()}


class NcclError(RuntimeError):
    pass


class Library:
    """As much of ``cupy.cuda.nccl`` as is used; the ranks are threads."""

    NcclError = NcclError

    def __init__(self, comm, version=22703):
        self.comm, self.version, self.made = comm, version, []

    def get_version(self):
        return self.version

    def get_unique_id(self):
        assert self.comm.rank == 0, "rank 0 makes the id, and the others are told"
        return ("id", 4711)

    def NcclCommunicator(self, size, unique, rank):
        assert unique == ("id", 4711) and (size, rank) == (self.comm.size, self.comm.rank)
        self.made.append(Fake(self.comm))
        self.made[-1].library = self
        return self.made[-1]

    # -- messages: those of a group are under way together, and each waits for its other end

    depth, queued = 0, ()

    def groupStart(self):
        self.depth += 1

    def groupEnd(self):
        self.depth -= 1
        if not self.depth:
            sends = [(memory(), peer) for memory, peer, out in self.queued if out]
            works = [self.comm.isend(data, peer) for data, peer in sends]
            for memory, peer, out in self.queued:
                if not out:
                    self.comm.recv(memory(), peer)
            for work in works:
                work.wait()
            self.queued = ()
            self.groups += 1

    groups = 0

    def message(self, memory, peer, out, stream):
        assert self.depth, "a message alone would wait for a peer that waits as well"
        find_device().synchronize(stream)
        self.queued += ((memory, peer, out),)


class Fake:
    """A communicator that does at once what NCCL would queue, on memory that it is told of."""

    def __init__(self, comm):
        self.comm, self.ended, self.trouble = comm, "", None
        self.library: Library

    def _at(self, pointer, count, code):
        dtype = NUMPY[code]
        if not count:
            return np.empty(0, dtype)
        memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(pointer)
        return np.frombuffer(memory, dtype)

    def allReduce(self, source, target, count, code, op, stream):
        find_device().synchronize(stream)
        x = self._at(source, count, code)
        self._at(target, count, code)[...] = self.comm.allreduce(x, NAMES[op])

    def reduce(self, source, target, count, code, op, root, stream):
        find_device().synchronize(stream)
        got = self.comm.reduce(self._at(source, count, code), NAMES[op], root)
        if got is not None:
            self._at(target, count, code)[...] = got

    def broadcast(self, source, target, count, code, root, stream):
        find_device().synchronize(stream)
        mine = self._at(source if self.comm.rank == root else target, count, code).copy()
        self._at(target, count, code)[...] = self.comm.broadcast(mine, root)

    def allGather(self, source, target, count, code, stream):
        find_device().synchronize(stream)
        x = self._at(source, count, code)
        self._at(target, count * self.comm.size, code)[...] = self.comm.allgather(x)

    def reduceScatter(self, source, target, count, code, op, stream):
        find_device().synchronize(stream)
        x = self._at(source, count * self.comm.size, code)
        self._at(target, count, code)[...] = self.comm.reduce_scatter(x, NAMES[op])

    def send(self, source, count, code, peer, stream):
        self.library.message(lambda: self._at(source, count, code).copy(), peer, True, stream)

    def recv(self, target, count, code, peer, stream):
        self.library.message(lambda: self._at(target, count, code), peer, False, stream)

    def check_async_error(self):
        if self.trouble is not None:
            raise self.trouble

    def abort(self):
        self.ended = "aborted"

    def destroy(self):
        self.ended = "destroyed"

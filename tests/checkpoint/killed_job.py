"""Saves checkpoints 1 and 2, and is killed in the second: python killed_job.py FOLDER MOMENT.

A moment is a call to the file system, before it or in the middle of what it writes.
"""

import os
import signal
import sys

import numpy as np

from mpidist import Checkpoint, run_simulated
from mpidist.checkpoint import files

folder, moment = sys.argv[1], int(sys.argv[2])
calls = saved = 0


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def counted(act, halfway=None):
    def call(*arguments):
        global calls
        calls += saved > 0
        if calls == moment + 1:
            if halfway is not None:
                halfway(*arguments)
            die()
        return act(*arguments)

    return call


def half(file, data):
    file.write(data[: len(data) // 2])
    file.flush()


class Disk:
    """The functions of os that mpidist.checkpoint.files uses, counted."""

    rename, fsync = staticmethod(counted(os.rename)), staticmethod(counted(os.fsync))
    open, close, O_RDONLY = os.open, os.close, os.O_RDONLY


class Files:
    def __init__(self, *arguments):
        self.file = open(*arguments)  # noqa: SIM115  closed by __exit__

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def write(self, data):
        counted(self.file.write, lambda data: half(self.file, data))(data)

    def flush(self):
        self.file.flush()

    def fileno(self):
        return self.file.fileno()


files.os, files.open = Disk, Files


def job(comm):
    checkpoint = Checkpoint(folder, comm, keep=1)
    for step in (1, 2):
        checkpoint.save(step, data=np.full(20000, step))
        if comm.rank == 0:
            global saved
            saved = step
            print("saved", step, flush=True)
        comm.barrier()  # what comes before and after is told apart


run_simulated(2, job)

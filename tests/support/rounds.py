"""Counts the rounds in which ranks talk to each other."""

import threading
from contextlib import contextmanager
from functools import wraps

from mpidist.communicator.communicator import Communicator

METHODS = ("allgather_object", "broadcast_object", "gather_object", "allgather", "allreduce")
METHODS += ("broadcast", "gather", "barrier", "reduce", "scatter", "alltoall")


@contextmanager
def rounds(monkeypatch):
    """Give the list of (rank, method) of every collective; one within another is not counted."""
    called, within = [], threading.local()

    def counting(name, method):
        @wraps(method)
        def call(comm, *args, **kwargs):
            if getattr(within, "call", False):
                return method(comm, *args, **kwargs)
            called.append((comm.rank, name))
            within.call = True
            try:
                return method(comm, *args, **kwargs)
            finally:
                within.call = False

        return call

    with monkeypatch.context() as patch:
        for name in METHODS:
            patch.setattr(Communicator, name, counting(name, getattr(Communicator, name)))
        yield called

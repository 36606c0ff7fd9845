"""How processes find each other in torch.distributed: rank and size from MPI, a store over it."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch.distributed as dist
from torch.distributed.rendezvous import _rendezvous_handlers as HANDLERS

from ..communicator import layers
from ..communicator.communicator import Communicator
from ..communicator.launch import on_replace
from ..communicator.launcher_notes import HYDRA, OPEN_MPI, SLURM
from ..errors import InvalidArgument
from .store import MpiStore

SCHEME = "mpidist"

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# NAME=value of what this module has set.  The processes of a job started from here inherit it all:
# the rank and address of another process are not the user's wish there.
SET_HERE = "MPIDIST_TORCH_VARIABLES"

_root: Communicator | None = None
_store: MpiStore | None = None
_groups = 0
_address: tuple[str, str] | None = None  # MASTER_ADDR and MASTER_PORT, where this module set them


def set_variables(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set RANK, WORLD_SIZE and LOCAL_RANK, as torchrun does, from an MPI launcher's variables.

    Nothing is set if the user has set one of them, or no launcher of MPI has started this process.
    """
    ours = _ours(environ)
    if any(name in environ and name not in ours for name in TORCHRUN):
        return
    for launcher in (OPEN_MPI, HYDRA, SLURM):
        names = list(filter(None, launcher))
        if all(name in environ for name in names):
            values = {name: environ[theirs] for name, theirs in zip(TORCHRUN, names)}
            if any(ours.get(name, value) != value for name, value in values.items()):
                for name in (*ours, SET_HERE):  # of the process that started this job
                    del environ[name]
            _set(values, environ)
            return


def _ours(environ: MutableMapping[str, str]) -> dict[str, str]:
    """Return the variables that this module has set, here or in a process before this one."""
    set_here = dict(pair.split("=", 1) for pair in environ.get(SET_HERE, "").split())
    return {name: value for name, value in set_here.items() if environ.get(name) == value}


def _set(values: dict[str, str], environ: MutableMapping[str, str]) -> None:
    """Set variables, and note that they are this module's."""
    environ.update(values)
    environ[SET_HERE] = " ".join(
        f"{n}={value}" for n, value in {**_ours(environ), **values}.items()
    )


def root(timeout: float | None = None) -> Communicator:
    """Return the communicator of all ranks for creating groups; the first call is collective.

    `timeout` in seconds is its deadline from then on, and that of creating it in the first call.
    """
    global _root
    if _root is None or _root.freed:
        from ..communicator.launch import get_communicator  # starts MPI

        comm = get_communicator()
        before = comm.timeout
        comm.timeout = before if timeout is None else timeout
        try:
            _root = comm.split(0)
        finally:
            comm.timeout = before
    assert _root is not None
    if timeout is not None:
        _root.timeout = timeout
    return _root


def rendezvous(
    url: str, timeout: timedelta | None = None, **_: Any
) -> Iterator[tuple[Any, int, int]]:
    """Yield once: the store, and MPI's rank and size, of a new process group; collective.

    This is the rendezvous handler of ``mpidist://`` in torch.distributed; `url` may have rank and
    world_size in the query: InvalidArgument if they are not those of MPI.
    """
    global _store, _groups
    comm = root(None if timeout is None else timeout.total_seconds())
    for name, text in parse_qsl(urlsplit(url).query):
        have = {"rank": comm.rank, "world_size": comm.size}.get(name)
        if have is not None and text != str(have):
            raise InvalidArgument(
                f"rank {comm.rank}: init_process_group({name}={text}): MPI says {have}: leave it "
                "out, or start as many processes by mpidist run, mpirun or srun"
            )
    if _store is None:
        own = comm.split(0)
        assert own is not None
        # A thread of rank 0 looks for requests at any time: the state of md.elastic that is kept
        # before a call would be one from the middle of a step.
        layers.before_calls(own, None)
        _store = MpiStore(own)
    _groups += 1
    _share_address(comm)
    # A prefix of its own: groups of gloo would find keys from before destroy_process_group().
    yield dist.PrefixStore(f"group {_groups}", _store), comm.rank, comm.size


def _share_address(comm: Communicator) -> None:
    """Set those variables of torchrun that are missing, as some libraries need them; collective.

    These are RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; and MASTER_ADDR and MASTER_PORT,
    both of them if MASTER_ADDR is missing, else neither.
    """
    global _address
    if _address is None:
        with socket.socket() as free:
            free.bind(("", 0))
            host, port = comm.broadcast_object((socket.gethostname(), free.getsockname()[1]))
        _address = (host, str(port))
    missing = {n: value for n, value in _variables(comm).items() if n not in os.environ}
    if "MASTER_ADDR" not in os.environ:
        missing["MASTER_ADDR"], missing["MASTER_PORT"] = _address
    _set(missing, os.environ)


def renew(comm: Communicator) -> None:
    """Begin anew with a communicator that has taken the place of the default one.

    The groups of the one before are destroyed, without a word to lost ranks.
    """
    global _root, _store, _address
    if dist.is_initialized():
        with suppress(Exception):  # of a broken communicator: nothing of it is needed
            dist.destroy_process_group()
    gc.collect()  # a DistributedDataParallel of before, whose callbacks are on the parameters
    _root = _store = _address = None
    ours = _ours(os.environ)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name in ours:
            del os.environ[name]
    values = _variables(comm)
    _set({name: value for name, value in values.items() if name in ours}, os.environ)


def _variables(comm: Communicator) -> dict[str, str]:
    """Return torchrun's variables for this rank, by name."""
    place = comm.rank, comm.size, comm.topology.local_rank, comm.topology.local_size
    return {name: str(value) for name, value in zip(TORCHRUN, place)}


def _without_address(before: Callable[..., Any]) -> Callable[..., Any]:
    """Return a handler of ``env://`` that calls `before` if the user has set MASTER_ADDR.

    Otherwise it calls :func:`rendezvous`, where rank and size are those of MPI.
    """

    def handler(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
        given = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        ours = given[0] is None or given == _address
        return rendezvous(url, **options) if ours else before(url, **options)

    return handler


def register() -> None:
    """Register the handlers of ``mpidist://`` and ``env://`` with torch.distributed, once."""
    if SCHEME not in HANDLERS:
        dist.register_rendezvous_handler(SCHEME, rendezvous)
        HANDLERS["env"] = _without_address(HANDLERS["env"])
        on_replace.append(renew)

"""A key-value store of torch.distributed over a communicator: no address, no port.

Rank 0 holds the keys.  A thread of it answers the requests of the other ranks, which are rare: a
process group of mpidist needs none, groups of gloo or NCCL next to it find each other by them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..communicator.communicator import Communicator
from ..errors import MpidistError

_REQUEST, _ANSWER = 0, 1  # tags
_POLL_SECONDS = (2e-4, 2e-2)  # between polls: at first, and after a long time without a request


class MpiStore(dist.Store):
    """A key-value store of torch.distributed whose keys are on rank 0 of a communicator.

    It has no queues.  Through a PrefixStore around it, as process groups get, `list_keys` raises
    NotImplementedError, too: PyTorch does not pass it on to a store written in Python.  Nothing
    else may use the communicator.
    """

    def __init__(self, comm: Communicator, timeout: timedelta = timedelta(minutes=5)):
        super().__init__()
        self._comm, self._seconds = comm, timeout.total_seconds()
        self._keys: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._clones: list[MpiStore] = []
        if comm.rank == 0 and comm.size > 1:
            threading.Thread(target=self._serve, name="mpidist-store", daemon=True).start()

    # -- operations -----------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key."""
        self._ask("set", key, _as_bytes(value))

    def get(self, key: str) -> bytes:
        """Wait until a key exists, and return its value; DistStoreError past the timeout."""
        found = None
        while found is None:  # another rank may delete it meanwhile
            self.wait([key])
            found = self._ask("get", key)
        return found

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the number that a key holds, at first 0, and return the sum."""
        return self._ask("add", key, int(amount))

    def append(self, key: str, value: str | bytes) -> None:
        """Append `value` to the value of a key, at first empty."""
        self._ask("append", key, _as_bytes(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key to `desired` if its value is `expected`; return the value that it then has.

        If `expected` is empty, a missing key is set, too; otherwise `expected` is returned for it.
        """
        return self._ask("compare_set", key, _as_bytes(expected), _as_bytes(desired))

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it existed."""
        return self._ask("delete_key", key)

    def num_keys(self) -> int:
        """Return the number of keys."""
        return self._ask("num_keys")

    def list_keys(self) -> list[str]:
        """Return all keys, in the order in which they were set first."""
        return self._ask("list_keys")

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""
        return self._ask("check", list(keys))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait until all keys exist, and return their values in order; DistStoreError if late."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        """Set the values of several keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Return True: there are `append`, `multi_get` and `multi_set`."""
        return True

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist, for `timeout` at most, by default that of the store.

        DistStoreError past it names the missing keys.
        """
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        until, pause = time.monotonic() + seconds, _POLL_SECONDS[0]
        while not self.check(keys):
            if time.monotonic() > until:
                missing = ", ".join(repr(key) for key in keys if not self.check([key]))
                raise dist.DistStoreError(
                    f"rank {self._comm.rank}: store: Timed out waiting {seconds:g} s for the keys "
                    f"{missing}: no rank has set them"
                )
            time.sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS[1])

    def clone(self) -> MpiStore:
        """Return another store with the same keys, and a timeout of its own.

        A clone is for another thread, by PyTorch's rule; of this store, threads may also share one.
        """
        made = MpiStore.__new__(MpiStore)
        dist.Store.__init__(made)
        made.__dict__.update(self.__dict__)
        self._clones.append(made)  # C++, such as PrefixStore.clone(), would not keep it alive
        return made

    @property
    def timeout(self) -> timedelta:
        """Longest time for which `get` and `wait` wait for keys."""
        return timedelta(seconds=self._seconds)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the longest time for which `get` and `wait` wait for keys."""
        self._seconds = timeout.total_seconds()

    # By these names C++ calls some of them.
    deleteKey, getNumKeys, compareSet = delete_key, num_keys, compare_set
    hasExtendedApi, multiGet, multiSet = has_extended_api, multi_get, multi_set

    # -- within ---------------------------------------------------------------------------------

    def _ask(self, operation: str, *arguments: Any) -> Any:
        """Perform an operation on the keys, by a message unless on rank 0; return its result."""
        if self._comm.rank == 0:
            answer = self._perform(operation, *arguments)
        else:
            with self._lock:
                self._comm.send_object((operation, arguments), 0, _REQUEST)
                answer = self._comm.recv_object(0, _ANSWER)
        if isinstance(answer, Exception):
            raise dist.DistStoreError(
                f"rank {self._comm.rank}: store: {operation}{arguments}: {answer}"
            ) from answer
        return answer

    def _perform(self, operation: str, *arguments: Any) -> Any:
        """Perform an operation on rank 0; return its result, or its error."""
        try:
            with self._lock:
                return _OPERATIONS[operation](self._keys, *arguments)
        except Exception as error:  # raised by the rank that asked: others are served on
            return error

    def _serve(self) -> None:
        """Answer the other ranks' requests, in a thread of rank 0, for the rest of the job."""
        comm, pause = self._comm, _POLL_SECONDS[0]
        while True:
            try:
                source = comm.iprobe(None, _REQUEST, "object")
                if source is None:
                    time.sleep(pause)
                    pause = min(1.02 * pause, _POLL_SECONDS[1])
                    continue
                operation, arguments = comm.recv_object(source, _REQUEST)
                comm.send_object(self._perform(operation, *arguments), source, _ANSWER)
                pause = _POLL_SECONDS[0]
            except MpidistError:  # broken or freed: the other ranks wait in vain, and say so
                return


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _add(keys: dict[str, bytes], key: str, amount: int) -> int:
    total = int(keys.get(key, b"0")) + amount
    keys[key] = str(total).encode()
    return total


def _append(keys: dict[str, bytes], key: str, value: bytes) -> None:
    keys[key] = keys.get(key, b"") + value


def _compare_set(keys: dict[str, bytes], key: str, expected: bytes, desired: bytes) -> bytes:
    if keys.get(key, b"") == expected:
        keys[key] = desired
    return keys.get(key, expected)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "set": lambda keys, key, value: keys.__setitem__(key, value),
    "get": lambda keys, key: keys.get(key),
    "add": _add,
    "append": _append,
    "compare_set": _compare_set,
    "delete_key": lambda keys, key: keys.pop(key, None) is not None,
    "num_keys": len,
    "list_keys": list,
    "check": lambda keys, wanted: all(key in keys for key in wanted),
}

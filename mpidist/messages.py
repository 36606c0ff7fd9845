"""Point-to-point messages and Python objects, over the tags that collectives do not use."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from .arrays import as_input, as_output, flat
from .errors import InvalidArgument
from .prepare import Place
from .service import Service
from .work import UNSET, Work

USER_TAGS = 1 << 20


class Messages:
    """Sends and receives of one communicator.

    Tags 0 … `USER_TAGS` - 1 are the user's; arrays, objects and agreements have a range each,
    above those of the collectives.
    """

    def __init__(self, service: Service):
        self.service, self.backend = service, service.backend
        self.place = Place(self.backend.rank, self.backend.size)
        limit = min(self.backend.tag_limit, 2**30)
        self._width = min(USER_TAGS, limit // 8)
        self._base = {"array": limit // 2, "object": limit * 5 // 8, "agree": limit * 3 // 4}

    def _tag(self, kind: str, tag: Any) -> int:
        if isinstance(tag, bool) or not isinstance(tag, (int, np.integer)):
            raise self.place.wrong(f"tag={tag!r}: must be a whole number")
        if not 0 <= tag < self._width:
            raise self.place.wrong(f"tag={tag}: allowed are 0 … {self._width - 1}")
        return self._base[kind] + int(tag)

    @property
    def arrays(self) -> tuple[int, int]:
        """Where the tags of arrays begin, and how many there are."""
        return self._base["array"], self._width

    def isend(
        self, x: Any, peer: Any, tag: Any, kind: str = "array", end: Callable[[], Any] | None = None
    ) -> Work:
        """Begin to send an array; `end` is called when it has gone."""
        peer = self._peer(peer)
        data = flat(as_input(x, self.place.rank))
        wire = self._tag(kind, tag)
        self.service.check_usable()
        self.service.under_way.sweep()
        request = self.backend.isend(data, peer, wire)
        return self._work(request.test, f"send to rank {peer}", end or _nothing)

    def irecv(
        self,
        out: Any,
        peer: Any,
        tag: Any,
        kind: str = "array",
        end: Callable[[], Any] | None = None,
    ) -> Work:
        """Begin to receive into `out`, which must have the message's length.

        `end` is called when it has come, and gives the result; by default `out`.
        """
        peer = self._peer(peer)
        wire = self._tag(kind, tag)
        memory = as_output(out, self.place.rank)
        packed = not memory.flags.c_contiguous
        data = np.empty(memory.size, memory.dtype) if packed else memory.reshape(-1)
        self.service.check_usable()
        request = self.backend.irecv(data, peer, wire)

        def give() -> Any:
            if packed:
                memory[...] = data.reshape(memory.shape)
            return out

        return self._work(request.test, f"recv from rank {peer}", end or give)

    def _peer(self, peer: Any) -> int:
        peer = self.place.check_rank(peer, "peer")
        if peer == self.place.rank:
            raise self.place.wrong(f"peer={peer} is this rank itself")
        return peer

    def _work(self, test: Any, what: str, give: Any) -> Work:
        def wait(test: Any, timeout: Any) -> None:
            self.service.check_usable()
            if not self.service.engine.wait(test, self.service.deadline(timeout)):
                error = self.service.timed_out(what, None, "", timeout)
                self.service.broken = f"the communicator is broken since {what} timed out: {error}"
                raise error

        def translated() -> bool:
            try:
                return test()
            except Exception as error:
                raise self.backend.translate(error) from error.__cause__

        return Work(translated, wait, give, self.service.under_way.works)

    def send_object(self, value: Any, peer: Any, tag: Any = 0, kind: str = "object") -> None:
        """Send any object that can be pickled."""
        data = as_bytes(value)
        first = self.isend(np.array([data.size]), peer, tag, kind)
        second = self.isend(data, peer, tag, kind)
        first.wait()
        second.wait()

    def recv_object(
        self, peer: Any, tag: Any = 0, timeout: Any = UNSET, kind: str = "object"
    ) -> Any:
        """Receive what `send_object` sent."""
        length = np.empty(1, np.int64)
        self.irecv(length, peer, tag, kind).wait(timeout)
        data = np.empty(int(length[0]), np.uint8)
        self.irecv(data, peer, tag, kind).wait(timeout)
        return pickle.loads(data.data)

    def agree(self, mine: Any) -> list[Any]:
        """Give everyone's object to everyone, over rank 0, where collectives cannot be trusted."""
        size, rank = self.backend.size, self.backend.rank
        if rank:
            self.send_object(mine, 0, 0, "agree")
            return self.recv_object(0, 0, kind="agree")
        everyone = [mine, *(self.recv_object(r, 0, kind="agree") for r in range(1, size))]
        for r in range(1, size):
            self.send_object(everyone, r, 0, "agree")
        return everyone


def _nothing() -> None:
    """Give the result of a message that was sent."""


def as_bytes(value: Any) -> np.ndarray:
    """Pickle an object into an array of bytes."""
    try:
        return np.frombuffer(pickle.dumps(value, protocol=5), np.uint8)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise InvalidArgument(f"the object cannot be pickled: {error}") from None

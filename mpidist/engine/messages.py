"""Point-to-point messages and Python objects, over the tags that collectives do not use.

A user's message begins with a short one that says what is sent: dtype, shape and number of bytes.
Up to 8 KiB its elements are in it; else they follow with a tag of their own, and are received when
the receiver has compared what it was told with the memory it has.  So none can overrun memory.
"""

from __future__ import annotations

import hashlib
import pickle
import struct
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..backends.base import SHORT_BYTES, AllOf, ShortRequest, pieces
from ..calls.arrays import as_input, as_output, flat
from ..calls.call import words_of
from ..calls.prepare import Place
from ..errors import InvalidArgument, MessageMismatch
from .run import Engine
from .service import Service
from .work import UNSET, Work, keep

USER_TAGS = 1 << 20
INLINE_BYTES = 8192
CHUNK_BYTES = 1 << 28  # of what follows; what is dropped takes no more memory than this
_HEAD = struct.Struct("<QIH")  # bytes of the message, tag of what follows or 0, bytes of the text
_LONGEST_TEXT = SHORT_BYTES - INLINE_BYTES - _HEAD.size - 16
_OBJECT = b"object"
_SEND, _RECV = "send to rank {}", "recv from rank {}"
_AT_A_TIME = 16  # of the messages that are looked for while something else is waited for


def _nothing() -> None:
    """Give the result of a message that was sent."""


class Form(NamedTuple):
    """Dtype, shape and size that sender and receiver compare, with their encoding."""

    nbytes: int
    text: bytes
    head: bytes


class Messages:
    """Sends and receives of one communicator.

    Tags 0 … `USER_TAGS` - 1 are the user's; arrays and objects have a range each, above those of
    the collectives, and so has what follows a short message.
    """

    def __init__(self, service: Service):
        self.service, self.backend = service, service.backend
        self.place = Place(self.backend.rank, self.backend.size)
        limit = min(self.backend.tag_limit, 2**30)
        self._width = min(USER_TAGS, limit // 8)
        self._base = {"array": limit // 2, "object": limit * 5 // 8}
        self._following, self._followed = limit * 7 // 8, 0
        self._forms: dict[tuple[np.dtype, tuple[int, ...]], Form] = {}
        self._arrivals = Arrivals(service.engine)

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

    # -- arrays -----------------------------------------------------------------------------------

    def send(self, x: Any, peer: Any, tag: Any) -> None:
        """Send an array."""
        peer, data = self.peer(peer), self._input(x)
        self._wait(self._post(data, self.form(data.dtype, data.shape), peer, tag), _SEND, peer)

    def isend(self, x: Any, peer: Any, tag: Any) -> Work:
        """Begin to send an array."""
        peer, data = self.peer(peer), self._input(x)
        return self.begin_send(data, self.form(data.dtype, data.shape), peer, tag)

    def begin_send(
        self,
        data: np.ndarray,
        form: Form,
        peer: int,
        tag: Any,
        end: Callable[[], Any] = _nothing,
        readable: bool = True,
    ) -> Work:
        """Begin to send the elements of `data`, which are announced as `form`.

        `end` is called when they have gone.  Memory that is not `readable` is for MPI only.
        """
        return self._work(self._post(data, form, peer, tag, "array", readable), _SEND, peer, end)

    def _post(
        self,
        data: np.ndarray,
        form: Form,
        peer: int,
        tag: Any,
        kind: str = "array",
        readable: bool = True,
    ) -> Callable[[], bool]:
        """Post what is sent; give the test whether it has gone."""
        wire = self._tag(kind, tag)
        self.service.check_usable()
        self.service.background.sweep()
        backend = self.backend
        if form.nbytes <= INLINE_BYTES and (readable or not form.nbytes):
            content = form.head + data.tobytes() if form.nbytes else form.head
            return backend.isend_short(content, peer, wire).test
        self._followed = follows = self._followed % self._width + 1
        first = backend.isend_short(_head(form.nbytes, follows, form.text), peer, wire)
        wire = self._following + follows - 1
        parts = pieces(flat(data), CHUNK_BYTES)
        return AllOf([first, *(backend.isend(part, peer, wire) for part in parts)]).test

    def recv(self, out: Any, peer: Any, tag: Any, timeout: Any = UNSET) -> Any:
        """Receive into `out`, which must have the dtype and shape of the message."""
        peer, data = self.peer(peer), self._output(out)
        form = self.form(data.dtype, data.shape)
        wire = self._tag("array", tag)
        self._receive(HostRoom(data), form, peer, tag, wire, timeout)
        return out

    def irecv(self, out: Any, peer: Any, tag: Any) -> Work:
        """Begin to receive into `out`, which must have the dtype and shape of the message."""
        peer, data = self.peer(peer), self._output(out)
        form = self.form(data.dtype, data.shape)
        return self.begin_receive(HostRoom(data), form, peer, tag, lambda: out)

    def begin_receive(
        self, room: Room, form: Form, peer: int, tag: Any, end: Callable[[], Any]
    ) -> Work:
        """Begin to receive what is announced as `form` into `room`.

        `end` is called when it has come, and gives the result.
        """
        wire = self._tag("array", tag)
        self.service.check_usable()
        first = self.backend.irecv_short(peer, wire)
        arrival = Arrival(self._take(first, room, form, peer, tag))
        self._arrivals.add(arrival)
        return self._work(arrival.came, _RECV, peer, end)

    def _receive(
        self, room: Room, form: Form | None, peer: int, tag: int, wire: int, timeout: Any
    ) -> None:
        """Receive what is announced as `form`, or anything if that is None, into `room`."""
        self.service.check_usable()
        first = self.backend.irecv_short(peer, wire)
        self._wait(first.test, _RECV, peer, timeout)
        if form is not None and first.content.startswith(form.head):  # the usual short message
            room.store(first.content, len(form.head), form.nbytes)
            first.release()
        else:
            self._wait(Arrival(self._take(first, room, form, peer, tag)).came, _RECV, peer, timeout)

    def _input(self, x: Any) -> np.ndarray:
        """Give the array that is sent."""
        return as_input(x, self.place.rank)

    def _output(self, out: Any) -> np.ndarray:
        """Give the array that is received into."""
        if type(out) is np.ndarray and out.flags.carray and not out.dtype.hasobject:
            return out  # contiguous and writable
        return as_output(out, self.place.rank)

    def form(self, dtype: np.dtype, shape: tuple[int, ...]) -> Form:
        """Give what two ranks must agree on; axes of length 1 are left out of the shape."""
        form = self._forms.get((dtype, shape))
        if form is None:
            nbytes = dtype.itemsize
            for length in shape:
                nbytes *= length
            text = _cut(f"{words_of(dtype)} {tuple(n for n in shape if n != 1)}".encode())
            form = Form(nbytes, text, _head(nbytes, 0, text))
            if len(self._forms) >= 1024:
                self._forms.clear()
            self._forms[dtype, shape] = form
        return form

    def _take(
        self, first: ShortRequest, room: Room, form: Form | None, peer: int, tag: int
    ) -> Iterator[None]:
        """Take a message, giving control back whenever a part of it has not come yet."""
        while not first.test():
            yield
        content = first.content
        if not content:
            return  # from a backend that moves nothing
        nbytes, follows, length = _HEAD.unpack_from(content)
        text = bytes(content[_HEAD.size : _HEAD.size + length])
        same = form is None or (nbytes, text) == (form.nbytes, form.text)
        if same and not follows:
            room.store(content, len(_head(nbytes, 0, text)), nbytes)
        first.release()
        wire = self._following + follows - 1
        if form is not None and not same:
            if follows:
                yield from self._drop(nbytes, peer, wire)
            raise self._mismatch(form, nbytes, text, peer, tag)
        if follows:
            parts = pieces(room.memory(nbytes), CHUNK_BYTES)
            rest = AllOf([self.backend.irecv(part, peer, wire) for part in parts])
            while not rest.test():
                yield
            room.filled()

    def _drop(self, nbytes: int, peer: int, wire: int) -> Iterator[None]:
        """Take what nobody can use, or its sender would wait for ever."""
        memory = np.empty(min(nbytes, CHUNK_BYTES), np.uint8)
        for start in range(0, nbytes, CHUNK_BYTES):
            request = self.backend.irecv(memory[: nbytes - start], peer, wire)
            while not request.test():
                yield

    def _mismatch(
        self, form: Form, nbytes: int, text: bytes, peer: int, tag: int
    ) -> MessageMismatch:
        sent, expected = text.decode(), form.text.decode()
        return MessageMismatch(
            f"rank {self.place.rank}: rank {peer} sent {sent} ({nbytes} bytes) with tag {tag}, "
            f"out has {expected} ({form.nbytes} bytes): dtype and shape must be equal (but for "
            "axes of length 1); the message was dropped",
            sender=peer,
            tag=int(tag),
            sent=sent,
            expected=expected,
        )

    def peer(self, peer: Any) -> int:
        """Check that `peer` is another rank."""
        peer = self.place.check_rank(peer, "peer")
        if peer == self.place.rank:
            raise self.place.wrong(f"peer={peer} is this rank itself")
        return peer

    def _work(self, test: Callable[[], bool], what: str, peer: int, end: Callable) -> Work:
        def wait(test: Callable[[], bool], timeout: Any) -> None:
            self.service.check_usable()
            self._wait(test, what, peer, timeout)

        def translated() -> bool:
            try:
                return test()
            except Exception as error:
                raise self.backend.translate(error) from error.__cause__

        return Work(translated, wait, end, self.service.background.works)

    def _wait(self, test: Callable[[], bool], what: str, peer: int, timeout: Any = UNSET) -> None:
        """Wait within the deadline; past it the communicator is broken, and the memory is kept."""
        service = self.service
        try:
            if test() or service.engine.wait(test, service.deadline(timeout)):
                return
        except Exception as error:
            raise self.backend.translate(error) from error.__cause__
        keep(test)
        what = what.format(peer)
        late = service.timed_out(what, None, "", timeout)
        service.broken = f"the communicator is broken since {what} timed out: {late}"
        raise late

    # -- objects ----------------------------------------------------------------------------------

    def send_object(self, value: Any, peer: Any, tag: Any = 0, kind: str = "object") -> None:
        """Send any object that can be pickled."""
        peer, data = self.peer(peer), as_bytes(value)
        form = Form(data.nbytes, _OBJECT, _head(data.nbytes, 0, _OBJECT))
        self._wait(self._post(data, form, peer, tag, kind), _SEND, peer)

    def recv_object(
        self, peer: Any, tag: Any = 0, timeout: Any = UNSET, kind: str = "object"
    ) -> Any:
        """Receive what `send_object` sent."""
        peer, room = self.peer(peer), ObjectRoom()
        self._receive(room, None, peer, tag, self._tag(kind, tag), timeout)
        return pickle.loads(room.data)


class Room(Protocol):
    """Where a message is to go."""

    def store(self, content: bytes | bytearray, start: int, nbytes: int) -> None:
        """Store a message that came whole: so many bytes from byte `start` on."""

    def memory(self, nbytes: int) -> np.ndarray:
        """Give flat memory that the message is received into."""

    def filled(self) -> None:
        """Store what was received into that memory."""


class HostRoom:
    """A user's array, contiguous or not."""

    __slots__ = ("_out", "_data")

    def __init__(self, out: np.ndarray):
        self._out = out

    def store(self, content: bytes | bytearray, start: int, nbytes: int) -> None:
        """Store a short message."""
        out = self._out
        out[...] = np.ndarray(out.shape, out.dtype, content, start)

    def memory(self, nbytes: int) -> np.ndarray:
        """Give the array itself if it can be received into, else scratch memory."""
        out = self._out
        whole = out.flags.c_contiguous
        self._data = out.reshape(-1) if whole else np.empty(out.size, out.dtype)
        return self._data

    def filled(self) -> None:
        """Copy from scratch memory."""
        if not self._out.flags.c_contiguous:
            self._out[...] = self._data.reshape(self._out.shape)


class ObjectRoom:
    """Memory for a pickled object, as long as the message says.

    Attributes
    ----------
    data : memoryview
        The object.
    """

    data = memoryview(b"")

    def store(self, content: bytes | bytearray, start: int, nbytes: int) -> None:
        """Copy a short message."""
        self.data = memoryview(content[start : start + nbytes])

    def memory(self, nbytes: int) -> np.ndarray:
        """Make as much memory."""
        made = np.empty(nbytes, np.uint8)
        self.data = made.data
        return made

    def filled(self) -> None:
        """Do nothing: the memory is kept."""


class Arrival:
    """A message that is being taken; goes on in every wait, but raises only for its holder.

    Attributes
    ----------
    done : bool
        Whether it has been taken, or could not be.
    """

    __slots__ = ("_steps", "_error", "done")

    def __init__(self, steps: Iterator[None]):
        self._steps, self.done = steps, False
        self._error: BaseException | None = None

    def came(self) -> bool:
        """Make progress; tell whether it has been taken, or raise why it could not be."""
        if self.ended() and self._error is not None:
            raise self._error
        return self.done

    def ended(self) -> bool:
        """Make progress; tell whether it has been taken, or could not be."""
        if not self.done:
            try:
                self.done = next(self._steps, True) is True
            except BaseException as error:
                self._error, self.done = error, True
                if not isinstance(error, Exception):
                    raise
        return self.done


class Arrivals:
    """Pending receives of a communicator, polled in every wait.

    A long message comes in two steps: its sender may wait for the second one while this rank waits
    for something else.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._pending: deque[Arrival] = deque()
        self._attended = False

    def add(self, arrival: Arrival) -> None:
        """Take part in every wait until a message has come."""
        pending = self._pending
        for _ in range(min(2, len(pending))):  # few are left of those that were waited for
            if pending[0].done:
                pending.popleft()
            else:
                pending.rotate(-1)
        pending.append(arrival)
        if not self._attended:
            self._attended = True
            self._engine.attend(self)

    @property
    def done(self) -> bool:
        """Whether none was left when they were last looked for."""
        return not self._attended

    def ended(self) -> bool:
        """Make progress, with some of them each time; tell whether none is left."""
        pending = self._pending
        for _ in range(min(_AT_A_TIME, len(pending))):
            arrival = pending.popleft()
            if not arrival.ended():
                pending.append(arrival)
        self._attended = bool(pending)
        return not self._attended

    test = ended


def _head(nbytes: int, follows: int, text: bytes) -> bytes:
    """Give the head of a short message; what it carries begins at a multiple of 16 bytes."""
    head = _HEAD.pack(nbytes, follows, len(text)) + text
    return head + b" " * (-len(head) % 16)


def _cut(text: bytes) -> bytes:
    """Shorten a text that is too long; what was cut off is still compared."""
    if len(text) <= _LONGEST_TEXT:
        return text
    digest = hashlib.sha256(text).hexdigest()[:32].encode()
    return text[: _LONGEST_TEXT - 40].decode(errors="ignore").encode() + b" ... " + digest


def as_bytes(value: Any) -> np.ndarray:
    """Pickle an object into an array of bytes."""
    try:
        return np.frombuffer(pickle.dumps(value, protocol=5), np.uint8)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise InvalidArgument(f"the object cannot be pickled: {error}") from None


class Posting:
    """Sends and receives without the costs of a Work; the holder keeps their memory.

    Parameters
    ----------
    comm : Communicator
        Nobody else sends arrays on it.

    Attributes
    ----------
    tags : int
        How many tags there are, from 0.
    """

    def __init__(self, comm: Any):
        self._service = comm._service
        self.comm, backend = comm, self._service.backend
        self._isend, self._irecv = backend.isend, backend.irecv
        self._base, self.tags = comm._messages.arrays

    def send(self, data: np.ndarray, peer: int, tag: int) -> Any:
        """Begin to send a flat array; gives what has ``test()``."""
        return self._isend(data, peer, self._base + tag)

    def receive(self, data: np.ndarray, peer: int, tag: int) -> Any:
        """Begin to receive into a flat array.

        Its ``test()`` raises :class:`~mpidist.CollectiveMismatch` once if the message was shorter.
        """
        return self._irecv(data, peer, self._base + tag)

    def check_usable(self) -> None:
        """Raise CommunicatorBroken if something before was left unfinished."""
        self._service.check_usable()

    def wait(self, test: Callable[[], bool], what: Callable[[], str]) -> None:
        """Wait for ``test()`` while all that is under way goes on.

        Raises
        ------
        CollectiveTimeout
            With ``what()``, past the communicator's deadline.
        """
        service = self._service
        if not service.engine.wait(test, service.deadline(UNSET)):
            raise service.timed_out(what(), None, "")

    def broke(self, error: BaseException, what: str, *memory: object) -> BaseException:
        """Note that `what` was left unfinished, and give the error to be raised.

        `memory` is what messages may still come to.
        """
        return self._service.broke(error, what, self._service.sequence, *memory)

"""Posted messages: bare elements, for users that have agreed on the length of each message."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from ..calls.arrays import as_input, as_output
from ..errors import CollectiveMismatch
from .messages import HostRoom, PointToPoint
from .run import Run
from .work import UNSET

_BYTE = np.dtype(np.uint8)


class PostedMessages:
    """The posted messages of one communicator.

    They share checks, tags and waits with its other messages.
    """

    def __init__(self, messages: PointToPoint):
        self._messages, self.sequencer = messages, messages.sequencer
        self._backend, self._place = messages.backend, messages.place
        self._first_tag, self._width = messages.wire_tag("posted", 0), messages.width

    def post_send(self, x: Any, peer: Any, tag: Any, checked: bool) -> PostedMessage:
        """Post the send of the elements of `x`, if `checked` behind a header with their length."""
        messages, data, wire = self._messages, x, self._wire(peer, tag)
        if type(x) is not np.ndarray or x.ndim != 1 or not x.flags.carray or x.dtype.hasobject:
            data = self._contiguous(as_input(x, self._place.rank), "x")
        if checked:
            test = messages.post(data, messages.form(_BYTE, (data.nbytes,)), peer, tag, "posted")
        else:
            try:
                test = self._backend.isend(data, peer, wire).test
            except Exception as error:  # MPI knows at once that the peer is dead
                what = f"post_send to rank {peer}"
                raise messages.ended(error, what, data) from error.__cause__
        return PostedMessage(self, test, False, data, peer, tag)

    def post_recv(self, out: Any, peer: Any, tag: Any, checked: bool) -> PostedMessage:
        """Post memory to receive the elements of a :meth:`post_send` that was `checked` alike."""
        messages, data, wire = self._messages, out, self._wire(peer, tag)
        if type(out) is not np.ndarray or out.ndim != 1 or not out.flags.carray:
            data = self._contiguous(as_output(out, self._place.rank), "out")
        elif out.dtype.hasobject:
            as_output(out, self._place.rank)  # raises
        try:
            if checked:
                first, room = self._backend.irecv_short(peer, wire), HostRoom(data.view(np.uint8))
                form = messages.form(_BYTE, (data.nbytes,))
                arrival = Run(messages.take(first, room, form, peer, tag))
                messages.arrivals.add(arrival)
                test = arrival.test
            else:
                test = self._backend.irecv(data, peer, wire).test
        except Exception as error:
            what = f"post_recv from rank {peer}"
            raise messages.ended(error, what, data) from error.__cause__
        return PostedMessage(self, test, True, data, peer, tag)

    def _wire(self, peer: Any, tag: Any) -> int:
        """Check peer and tag of a posted message; return the tag that the backend uses for it."""
        # One expression for the usual message; the checks behind it say what is wrong.
        if (
            type(tag) is not int
            or type(peer) is not int
            or not 0 <= tag < self._width
            or not 0 <= peer < self._backend.size
            or peer == self._backend.rank
            or self.sequencer.broken is not None
        ):
            self._messages.wire_tag("posted", tag)
            self._messages.peer(peer)
            self.sequencer.check_usable()
        return self._first_tag + tag

    def _contiguous(self, data: np.ndarray, argument: str) -> np.ndarray:
        """Return a flat view of an array, which must be C-contiguous."""
        if not data.flags.c_contiguous:
            raise self._place.wrong(
                f"{argument} of shape {data.shape} has strides {data.strides}: expected "
                "C-contiguous memory, because a posted message is not copied"
            )
        return data.reshape(-1)

    def wait_all(
        self, messages: Iterable[PostedMessage], what: str | Callable[[], str] | None, timeout: Any
    ) -> None:
        """Wait until all posted messages are complete; see :meth:`Communicator.wait_all`."""
        if what is not None and not callable(what) and not (isinstance(what, str) and what.strip()):
            raise self._place.wrong(
                f"what={what!r}: expected None, a str, or a function without arguments"
            )
        every, left = list(messages), []
        for message in every:
            if type(message) is not PostedMessage or message.owner is not self:
                raise self._place.wrong(
                    f"messages has {message!r}: expected results of post_send and post_recv of "
                    "this communicator"
                )
            if not message.ended():
                left.append(message)

        def ended() -> bool:
            while left and left[-1].ended():
                left.pop()
            return not left

        if left:
            self.sequencer.check_usable()
            test = left[0].ended if len(left) == 1 else ended
            self._messages.wait(test, partial(_describe, what), left, timeout)
        for message in every:
            message.poll()

    def translated(self, error: Exception, message: PostedMessage) -> BaseException:
        """Return an error of the backend as mpidist's, with rank, peer and tag of the message."""
        ours = self._messages.ended(error, message.describe(), message)
        if not isinstance(ours, CollectiveMismatch):
            return ours
        rank = self._place.rank
        detail = str(ours).removeprefix(f"rank {rank}: ")
        return CollectiveMismatch(f"rank {rank}: {message.describe()}: {detail}")


def _describe(what: str | Callable[[], str] | None, left: list[PostedMessage]) -> str:
    """Return what a wait is for: the user's `what`, or the first of the incomplete messages."""
    if what is not None:
        return what if isinstance(what, str) else what()
    others = f", and {len(left) - 1} more" if len(left) > 1 else ""
    return f"{left[0].describe()}{others}"


class PostedMessage:
    """A message that ``comm.post_send`` or ``comm.post_recv`` has posted.

    The message is complete when its memory may be used again: it was sent from, or filled.  Until
    then the memory is kept, even if this object is dropped.

    Attributes
    ----------
    peer, tag : int
        Rank of the other side, and tag, as the user gave them.
    nbytes : int
        Length in bytes of the user's memory.
    """

    __slots__ = ("owner", "peer", "tag", "_test", "_incoming", "_data", "_error")

    def __init__(
        self,
        owner: PostedMessages,
        test: Callable[[], bool],
        incoming: bool,
        data: np.ndarray,
        peer: int,
        tag: int,
    ):
        self.owner, self.peer, self.tag = owner, peer, tag
        self._test: Callable[[], bool] | None = test
        self._incoming, self._data = incoming, data
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        return f"<PostedMessage {self.describe()}>"

    @property
    def nbytes(self) -> int:
        """Length in bytes of the memory that the user posted."""
        return self._data.nbytes

    def test(self) -> bool:
        """Poll; return whether the message is complete.

        Raises
        ------
        CollectiveMismatch
            If its length differs from that of the given memory; raised again by each call.
        """
        if self._test is None:
            return self.poll()
        door = self.owner.sequencer.door
        token = door.enter_pending()
        try:
            return self.poll()
        finally:
            door.leave(token)

    def poll(self) -> bool:
        """Poll, as :meth:`test` does, for a caller that is inside the communicator's door."""
        if self._test is not None and not self.ended():
            return False
        if self._error is not None:
            raise self._error
        return True

    def wait(self, timeout: float | None = UNSET) -> None:
        """Wait until the message is complete.

        Parameters
        ----------
        timeout : float or None, optional
            Seconds; None waits forever; by default the communicator's deadline.

        Raises
        ------
        CollectiveMismatch
            See :meth:`test`.
        CollectiveTimeout
            If the deadline passed; it names rank, peer and tag, and the communicator is broken.
        """
        door = self.owner.sequencer.door
        token = door.enter_pending()
        try:
            self.owner.wait_all([self], None, timeout)
        finally:
            door.leave(token)

    def ended(self) -> bool:
        """Poll; return whether the message is complete or has failed, without raising."""
        test = self._test
        if test is not None:
            try:
                if not test():
                    return False
            except Exception as error:
                self._error = self.owner.translated(error, self)
                self._error.__cause__ = error
            self._test = None  # releases the request and its memory
        return True

    def describe(self) -> str:
        """Return text with the kind, peer and tag of the message, for reports."""
        kind, way = ("post_recv", "from") if self._incoming else ("post_send", "to")
        return f"{kind} of {self.nbytes} bytes {way} rank {self.peer} with tag {self.tag}"

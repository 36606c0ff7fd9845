"""The channel of a rank: sends activations and gradients between its stages and other ranks'."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterable
from functools import partial
from math import prod
from typing import NamedTuple

import numpy as np

from ..backends.base import MAX_MESSAGE_BYTES, pieces
from ..communicator.communicator import Communicator
from ..communicator.layers import max_tag
from ..engine.posted import PostedMessage
from ..errors import CollectiveMismatch, Unsupported
from ..frameworks.base import find_dtype
from .schedules import Message
from .values import Metadata, TensorMessage, Tensors

HEADER_BYTES = 512
KINDS = ("activation", "gradient")
_NOTHING = np.empty(0, np.uint8)
_TOKEN = np.zeros(1, np.uint8)  # sent in place of tensors without elements


class Receipt(NamedTuple):
    """Posted receives of one value: its metadata, the arrays to fill, and the messages."""

    metadata: Metadata
    arrays: list[np.ndarray]
    messages: list[PostedMessage]


class Channel:
    """Sends values (nested structures of tensors) to stages on other ranks, and receives theirs.

    The receiver must know dtypes and shapes before it can post memory.  A header announces them
    once for each tag (of stage, kind and microbatch); in later steps only the elements are sent,
    into receives that are posted already::

        step 1   sender    header  elements              receiver  header, post, elements
        step 2   sender            elements              receiver  (posted) elements
        step 3   sender    empty   header  elements      the shape has changed: an empty message in
                                                         place of each that the receiver expects
    """

    def __init__(self, comm: Communicator, microbatches: int, stages: int):
        self._comm, self._microbatches = comm, microbatches
        needed, tags = 2 * stages * microbatches, max_tag(comm) + 1
        if needed > tags:
            raise Unsupported(
                f"rank {comm.rank}: {stages} stages of num_microbatches={microbatches} "
                f"need {needed} tags, this communicator has {tags}: expected fewer microbatches"
            )
        # By tag, the metadata of the last value: what the other end knows without a header.
        self._sent: dict[int, Metadata] = {}
        self._received: dict[int, Metadata] = {}
        self._posted: dict[int, Receipt] = {}
        self._pending: deque[PostedMessage] = deque()
        self.messages = self.nbytes = 0  # sent so far, with headers
        self.announced = 0  # headers among them

    def tag(self, message: Message) -> int:
        """Return the tag of a message, unique within a step."""
        kind = KINDS.index(message.kind)
        return (message.stage * 2 + kind) * self._microbatches + message.microbatch

    # -- sending ----------------------------------------------------------------------------------

    def send(self, peer: int, tag: int, message: TensorMessage) -> None:
        """Begin to send a value (metadata and arrays) to rank `peer`.

        Its arrays are kept alive until they have been sent.
        """
        metadata, known = message.metadata, self._sent.get(tag)
        if known is not metadata and known != metadata:
            self._announce(peer, tag, metadata, known)
        # Without elements a token is sent: the receiver must learn that the action has run.
        for array in [a for a in message.arrays if a.nbytes] or [_TOKEN]:
            for piece in _pieces(array):
                self._send(piece, peer, tag)
        pending = self._pending
        # From the oldest on, up to one that is pending: testing all would cost a call for each.
        while pending and pending[0].test():
            pending.popleft()

    def _send(self, array: np.ndarray, peer: int, tag: int) -> None:
        self._pending.append(self._comm.post_send(array, peer, tag))
        self.messages += 1
        self.nbytes += array.nbytes

    def _announce(self, peer: int, tag: int, metadata: Metadata, known: Metadata | None) -> None:
        """Send a header with `metadata`; `known` is that of the receives that are posted."""
        # The receiver has posted the old shape: an empty message ends each of these receives.
        for _ in range(_messages_of(known) if known is not None else 0):
            self._send(_NOTHING, peer, tag)
        data = np.frombuffer(pickle.dumps(metadata, protocol=5), np.uint8)
        # Of fixed length, since the receiver does not know it: most metadata fits into one message.
        head = np.zeros(HEADER_BYTES, np.uint8)
        head[:8] = np.array([data.size]).view(np.uint8)
        room = HEADER_BYTES - 8
        head[8 : 8 + min(room, data.size)] = data[:room]
        self._send(head, peer, tag)
        if data.size > room:
            self._send(data[room:], peer, tag)
        self._sent[tag] = metadata
        self.announced += 1

    # -- receiving --------------------------------------------------------------------------------

    def post(self, peer: int, tag: int, tensors: Tensors) -> None:
        """Post the receives of the next value from `peer` with `tag`, if its metadata is known."""
        metadata = self._received.get(tag)
        if metadata is not None:
            self._posted[tag] = self._post(metadata, peer, tag, tensors)

    def _post(self, metadata: Metadata, peer: int, tag: int, tensors: Tensors) -> Receipt:
        arrays = [tensors.empty(dtype, prod(shape)) for dtype, shape, _ in metadata.tensors]
        filled = [array for array in arrays if array.nbytes] or [np.empty(1, np.uint8)]
        post = self._comm.post_recv
        messages = [post(piece, peer, tag) for a in filled for piece in _pieces(a)]
        return Receipt(metadata, arrays, messages)

    def receive(self, message: Message, tag: int, tensors: Tensors) -> TensorMessage:
        """Wait for the message of the schedule that `message` describes; return the value in it."""
        receipt = self._posted.pop(tag, None)
        # A posted receive of another size than what arrived: its header comes next.
        if receipt is None or not self._wait(receipt, message):
            metadata = self._header(message, tag)
            receipt = self._post(metadata, message.source, tag, tensors)
            self._received[tag] = metadata
            if not self._wait(receipt, message):
                raise CollectiveMismatch(f"{summary(message)} does not have the size in its header")
        return TensorMessage(receipt.metadata, receipt.arrays)

    def _wait(self, receipt: Receipt, message: Message) -> bool:
        """Wait for the posted receives of a value; return False if a message has another size."""
        try:
            self._comm.wait_all(receipt.messages, partial(summary, message))
        except CollectiveMismatch:
            return False
        return True

    def _header(self, message: Message, tag: int) -> Metadata:
        """Wait for a header, see :meth:`_announce`, and return the metadata in it."""
        head = np.empty(HEADER_BYTES, np.uint8)
        self._take(head, message, tag)
        (size,) = head[:8].view(np.int64).tolist()
        data = head[8 : 8 + size]
        if size > data.size:
            rest = np.empty(size - data.size, np.uint8)
            self._take(rest, message, tag)
            data = np.concatenate([data, rest])
        return pickle.loads(data.data)

    def _take(self, array: np.ndarray, message: Message, tag: int) -> None:
        posted = self._comm.post_recv(array, message.source, tag)
        self._comm.wait_all([posted], partial(summary, message))

    # -- the end ----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait until all sends so far are complete."""
        self._comm.wait_all(self._pending, "pipeline: sends at the end of a step")
        self._pending.clear()


def _pieces(array: np.ndarray) -> Iterable[np.ndarray]:
    """Return the parts of an array that fit a message; usually the array is the only one."""
    return (array,) if array.nbytes <= MAX_MESSAGE_BYTES else pieces(array)


def _messages_of(metadata: Metadata) -> int:
    """Return the number of messages that carry the elements of a value with this metadata."""
    sizes = [prod(shape) * find_dtype(dtype).itemsize for dtype, shape, _ in metadata.tensors]
    return sum(-(-nbytes // MAX_MESSAGE_BYTES) for nbytes in sizes) or 1


def summary(message: Message) -> str:
    """Return text that describes a message of a pipeline, for error reports."""
    return (
        f"pipeline: {message.kind} of microbatch {message.microbatch} for stage {message.stage} "
        f"from rank {message.source}"
    )

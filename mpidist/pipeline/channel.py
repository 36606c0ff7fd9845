"""Channels: activations and gradients between stages."""

from __future__ import annotations

import pickle
from collections import deque
from functools import partial
from math import prod
from typing import NamedTuple

import numpy as np

from ..backends.base import MAX_MESSAGE_BYTES, pieces
from ..communicator.communicator import Communicator
from ..engine.messages import PostedMessage
from ..errors import CollectiveMismatch, Unsupported
from ..frameworks.base import find_dtype
from .schedules import Message
from .values import Form, Parcel, Tensors

HEADER_BYTES = 512
KINDS = ("activation", "gradient")
_NOTHING = np.empty(0, np.uint8)
_TOKEN = np.zeros(1, np.uint8)  # in place of the tensors of a parcel that has no bytes


class Receipt(NamedTuple):
    """Receives that were posted for a parcel."""

    form: Form
    arrays: list[np.ndarray]
    messages: list[PostedMessage]


class Edges:
    """All edges of one rank.

    Parameters
    ----------
    comm : Communicator
        The pipeline's own.
    microbatches, stages : int
        How many there are.

    Attributes
    ----------
    messages, nbytes : int
        Sent so far, headers among them.
    announced : int
        How often a form was sent.
    """

    def __init__(self, comm: Communicator, microbatches: int, stages: int):
        self._comm, self._microbatches = comm, microbatches
        needed, tags = 2 * stages * microbatches, comm.max_tag + 1
        if needed > tags:
            raise Unsupported(
                f"rank {comm.rank}: {stages} stages of num_microbatches={microbatches} "
                f"need {needed} tags, MPI allows {tags} here"
            )
        self._told: dict[int, Form] = {}
        self._known: dict[int, Form] = {}
        self._posted: dict[int, Receipt] = {}
        self._leaving: deque[PostedMessage] = deque()
        self.messages = self.nbytes = self.announced = 0

    def tag(self, message: Message) -> int:
        """Give the tag that a message has to itself."""
        kind = KINDS.index(message.kind)
        return (message.stage * 2 + kind) * self._microbatches + message.microbatch

    # -- sending ----------------------------------------------------------------------------------

    def send(self, peer: int, tag: int, parcel: Parcel) -> None:
        """Begin to send; the arrays are kept until they have gone."""
        form, known = parcel.form, self._told.get(tag)
        if known is not form and known != form:
            self._announce(peer, tag, form, known)
        for array in [a for a in parcel.arrays if a.nbytes] or [_TOKEN]:
            for piece in pieces(array):
                self._send(piece, peer, tag)
        leaving = self._leaving
        while leaving and leaving[0].test():
            leaving.popleft()

    def _send(self, array: np.ndarray, peer: int, tag: int) -> None:
        self._leaving.append(self._comm.post_send(array, peer, tag))
        self.messages += 1
        self.nbytes += array.nbytes

    def _announce(self, peer: int, tag: int, form: Form, known: Form | None) -> None:
        for _ in range(_messages_of(known) if known is not None else 0):
            self._send(_NOTHING, peer, tag)
        data = np.frombuffer(pickle.dumps(form, protocol=5), np.uint8)
        head = np.zeros(HEADER_BYTES, np.uint8)
        head[:8] = np.array([data.size]).view(np.uint8)
        room = HEADER_BYTES - 8
        head[8 : 8 + min(room, data.size)] = data[:room]
        self._send(head, peer, tag)
        if data.size > room:
            self._send(data[room:], peer, tag)
        self._told[tag] = form
        self.announced += 1

    # -- receiving --------------------------------------------------------------------------------

    def post(self, peer: int, tag: int, tensors: Tensors) -> None:
        """Post the receives of a parcel, if its form is known."""
        form = self._known.get(tag)
        if form is not None:
            self._posted[tag] = self._receives(form, peer, tag, tensors)

    def _receives(self, form: Form, peer: int, tag: int, tensors: Tensors) -> Receipt:
        arrays = [tensors.empty(dtype, prod(shape)) for dtype, shape, _ in form.tensors]
        filled = [array for array in arrays if array.nbytes] or [np.empty(1, np.uint8)]
        post = self._comm.post_recv
        messages = [post(piece, peer, tag) for a in filled for piece in pieces(a)]
        return Receipt(form, arrays, messages)

    def receive(self, message: Message, tag: int, tensors: Tensors) -> Parcel:
        """Wait for a parcel."""
        receipt = self._posted.pop(tag, None)
        if receipt is None or not self._came(receipt, message):
            form = self._header(message, tag)
            receipt = self._receives(form, message.source, tag, tensors)
            self._known[tag] = form
            if not self._came(receipt, message):
                raise CollectiveMismatch(f"{describe(message)} is not what was announced for it")
        return Parcel(receipt.form, receipt.arrays)

    def _came(self, receipt: Receipt, message: Message) -> bool:
        """Wait for what was posted; False if its form has changed."""
        try:
            self._comm.wait_all(receipt.messages, partial(describe, message))
        except CollectiveMismatch:
            return False
        return True

    def _header(self, message: Message, tag: int) -> Form:
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
        self._comm.wait_all([posted], partial(describe, message))

    # -- the end ----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait until everything has gone."""
        self._comm.wait_all(self._leaving, "pipeline: sends at the end of a step")
        self._leaving.clear()


def _messages_of(form: Form) -> int:
    """Count the messages of a parcel."""
    sizes = [prod(shape) * find_dtype(dtype).itemsize for dtype, shape, _ in form.tensors]
    return sum(-(-nbytes // MAX_MESSAGE_BYTES) for nbytes in sizes) or 1


def describe(message: Message) -> str:
    """Say which message it is."""
    return (
        f"pipeline: {message.kind} of microbatch {message.microbatch} for stage {message.stage} "
        f"from rank {message.source}"
    )

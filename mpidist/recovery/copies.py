"""Copies: records of a commit from which training goes on where nobody has the objects any more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..communicator.communicator import Communicator
from ..errors import CommunicationError
from . import records
from .observer import Sending
from .packing import Packed, arrays_of, filled, from_bytes, lengths_of, to_parts
from .vault import Reader, Vault


@dataclass
class Own:
    """The record of what one rank alone has."""

    generators: bytes  # pickled, by name
    buffers: dict[str, list[Any]]  # of models, by model


@dataclass
class Copy(Own):
    """The head of a record of all that a rank has, behind which its share of the arrays stands."""

    # The arrays that three ranks have alike, in a row, and their shares::
    #
    #     weights          moments
    #     [------------------------------]
    #     rank 0    |rank 1    |rank 2
    #
    small: bytes  # pickled: states, values and rates of optimizers
    parts: dict[str, list[Packed]]  # of objects of which each rank has another state, or a part
    left_out: list[Packed]  # by the hook of each DDP
    sending: Sending
    measured: bytes  # pickled: what "auto" has measured, for the next start of the job
    lengths: dict[str, Any]  # of those arrays


def write_copy(
    vault: Vault, step: int, head: Copy, shared: Mapping[str, Packed], share: int, shares: int
) -> list[bytes | memoryview]:
    """Write the record of a step with one of `shares` shares of the arrays in `shared`.

    Return the bytes of the head.
    """
    head.lengths = lengths_of(shared)
    arrays = arrays_of(shared)
    total = sum(map(len, arrays))
    first, last = (total * s // shares for s in (share, share + 1))
    found, at = [], 0
    for array in arrays:  # of the bytes of all arrays in a row, those from `first` to `last`
        found.append(array[max(first - at, 0) : max(last - at, 0)])
        at += len(array)
    about = {"share": share, "shares": shares, "alone": len(head.parts)}
    parts = to_parts(head)
    vault.write(step, parts, [part for part in found if len(part)], **about)
    return parts


def read_copies(
    comm: Communicator,
    offers: Sequence[records.Steps],
    readers: Mapping[int, Reader],
    before: int,
) -> tuple[int, dict[int, Copy], dict[str, Packed]] | None:
    """Return the newest step that is complete, its records by rank, and what all had alike.

    It is collective.  `offers` are the records of the `before` ranks that each rank can read, in
    this one's `readers`.  None if a record is no copy: its rank had not come to a `keep` that needs
    them, nor others to calls.
    """
    steps = records.complete(offers, before)
    if not steps:
        raise CommunicationError(
            f"rank {comm.rank}: md.elastic: no step of which all ranks have left records: "
            f"{records.missing(offers, before)}"
        )
    step = max(steps)
    left = steps[step]

    def get(rank: int, start: int, stop: int) -> np.ndarray:
        # Another node may have the head of a record that is whole here.
        holders = [r for r, held in enumerate(offers) if held.get(rank, {}).get(step) == left[rank]]
        data = np.empty(stop - start, np.uint8)
        if comm.rank == holders[0] or len(holders) == comm.size:
            data[:] = np.frombuffer(readers[rank].read(step, start, stop), np.uint8)
        if len(holders) < comm.size and len(data):
            comm.broadcast(data, out=data, root=holders[0], algorithm="binomial")
        return data

    heads = {rank: from_bytes(get(rank, 0, left[rank].head)) for rank in sorted(left)}
    if not all(isinstance(head, Copy) for head in heads.values()):
        return None
    shares = [get(r, left[r].head, left[r].length) for r in records.in_shares(left)]
    return step, heads, filled(heads[min(heads)].lengths, np.concatenate(shares))


def objects_alone(readers: Mapping[int, Reader]) -> list[str]:
    """Return the names of objects that are another one on each rank, as a copy has them."""
    for reader in readers.values():
        for step, record in reader.steps().items():
            if record.alone:
                return list(from_bytes(reader.read(step, 0, record.head)).parts)
    return []

"""The tags of a communicator's messages: one space, cut into ranges here and nowhere else.

A backend has the tags 0 … limit - 1, and MPI the tag `limit` too::

    0                limit/2                                   limit·3/4                  limit
    ├─ operations ───┼─ messages ──────────────────────────────┼─ set-up ──────────────────────┤
    │ 0 │ 1 │ … │ 64 │array│object│posted│group│elements│      │exchange│roll call│arrivals│   last
      │
      one bank: 0 for blocking operations, one at a time; the others for those in the background
      ├ 0: outside of strands │ t·256 + k + 1: strand k of the strand with t │ 256: greeting ┤

    limit          operations: banks × tags   messages: kinds × tags
    32767          1 + 8   ×  1,820           5 ×     1,638           the least that MPI allows
    2³¹ - 1        1 + 64  × 65,536           5 × 1,048,576

A strand's tag is the path to it as a number in base 256, with the digits 1 … 255.  As no digit is
0, a multiple of 256 is no strand's tag, which leaves 256 for greetings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

_LEVEL = 256
STRANDS = _LEVEL - 1
"""The most strands of one ``parallel``: segments, or the two halves of a double tree."""
BANKS = 64
"""The most background operations with tags of their own."""
ARRIVALS = 2048
"""The most native operations that are pending in the background between nodes."""
SPLIT = 32000
"""Tag by which MPI makes the communicators of a split: MPI keeps these apart from messages'."""
BLOCKING = 0
"""First tag of blocking operations: one at a time, in the same order on all ranks."""
GREETING = _LEVEL
"""Tag, in each bank, of the messages that name the call."""
_SPACE = _LEVEL**2  # largest number of tags of one operation: two levels of strands
_FEWEST_BANKS = 8
_WIDTH = 1 << 20  # the most tags of a user's messages
_KINDS = ("array", "object", "posted", "group", "elements")
_REACH = 2**30  # messages and set-up have no tags above it


@dataclass(frozen=True)
class Tags:
    """The ranges of the tags of one communicator."""

    space: int  # tags of an operation, those of one bank
    banks: int  # the most background operations with tags of their own: banks 1 … `banks`
    width: int  # tags of each kind of message; the user's are 0 … `width` - 1
    first: Mapping[str, int]  # by kind of message, for the user's tag 0
    exchange: int  # of set-up
    roll_call: int  # of the questions to ranks of other nodes; those of `arrival` follow
    last: int  # of the last messages on a communicator that is freed

    def elements(self, follows: int) -> int:
        """Return the tag of the elements whose header has the number `follows`, 1 … `width`."""
        return self.first["elements"] + follows - 1

    def arrival(self, number: int) -> int:
        """Return the tag of barrier `number` between nodes, 0 … `ARRIVALS` (2048)."""
        return self.roll_call + 1 + number


@cache
def tags_of(limit: int) -> Tags:
    """Return the ranges of the tags of a backend whose ``tag_limit`` is `limit`.

    >>> tags = tags_of(2**31 - 1)
    >>> tags.space, tags.banks, tags.width
    (65536, 64, 1048576)
    >>> tags = tags_of(32767)  # what MPI promises
    >>> tags.space, tags.banks, tags.width
    (1820, 8, 1638)
    """
    half = limit // 2
    banks = min(BANKS, max(_FEWEST_BANKS, half // _SPACE - 1))
    reach = min(limit, _REACH)
    messages, set_up = reach // 2, reach // 4 * 3
    width = min(_WIDTH, (set_up - messages) // len(_KINDS))
    first = {kind: messages + n * width for n, kind in enumerate(_KINDS)}
    return Tags(min(_SPACE, half // (banks + 1)), banks, width, first, set_up, set_up + 1, limit)


def of_strand(tag: int, k: int) -> int:
    """Return the tag of strand `k` of the strand that has `tag`, in bank 0."""
    return tag * _LEVEL + k + 1


def in_bank(tag: int, bank: int, space: int) -> int:
    """Return the tag in `bank` that `tag` stands for in bank 0; a bank has `space` tags."""
    return tag + bank * space


def of_group(tag: int) -> int:
    """Return the tag by which MPI makes a group's communicator; `tag` is the user's."""
    return tag % SPLIT

"""What the prover gives: the counts of a schedule, and what else was shown of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Proof:
    """What was shown of a schedule for one size and root.

    Attributes
    ----------
    rounds : int
        Largest number of rounds of any rank (of all its strands together).
    depth : int
        Rounds on the longest chain of messages, each of which waits for the one before.
    messages : int
        Messages of all ranks together; `sent` gives them rank by rank.
    blocks_moved : int
        Blocks in all messages together; `blocks_sent` gives them rank by rank.
    reductions : int
        Blocks combined, over all ranks.
    written : tuple of int
        Distinct blocks of ``out`` and ``tmp`` that each rank writes: its need of memory.
    ordered : bool
        Every result combines the contributions in rank order.
    identical : bool
        All ranks compute each result by the very same expression, and so get the same bits.
    """

    collective: str
    size: int
    root: int
    block_count: int
    rounds: int
    depth: int
    messages: int
    blocks_moved: int
    reductions: int
    sent: tuple[int, ...]
    blocks_sent: tuple[int, ...]
    written: tuple[int, ...]
    ordered: bool
    identical: bool

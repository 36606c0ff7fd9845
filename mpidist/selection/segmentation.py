"""Segmentation: how many pieces each block is cut into, and how many are in flight."""

from __future__ import annotations

from dataclasses import dataclass

from ..backends.tags import STRANDS
from ..schedule.registry import Algorithm

_BLOCK_LIMIT = 1 << 30  # bytes: MPI counts are 32-bit in some places of every library
# Two ranks have nobody to pass a segment on to, and two in flight slow each other down: with 1 MiB,
# buffers of 2 to 16 MiB took 1.1 times as long as with 4 MiB in the mean, and 0.9 to 1.6 (recursive
# doubling, binomial broadcast and reduce, scan; Open MPI and MPICH); whole ones as with 4 MiB.
_SEGMENT, _OF_TWO = 1 << 20, 4 << 20
_FEWER = ("allreduce", "hierarchical")  # has fewer segments in flight with MPICH
_BETWEEN_NODES = (128 << 10, 256 << 10)  # bytes of a segment, at least and at most
# Pieces in the halves of a slot: 32 and 128 KiB took 1.05 to 1.1 times as long, from 512 KiB on, on
# 2 ranks, but each takes 10 µs to bind, in each of the first two calls of an array: so there are at
# most 8, and longer arrays have longer ones.  Those of 256 KiB took as long as 128 and 512, and of
# 1 MiB 1.4 to 1.8 times as long: the halves of all slots no longer fit into a cache.
_SLOT_PIECES = ((64 << 10, 8), (256 << 10, 32), (512 << 10, 1 << 20))
# What a rank combines at a time: 128 to 512 KiB took equally long, and 1 MiB 1.4 times as long (an
# allreduce of 4 MiB on 2 ranks).
_REDUCED_PIECES = ((512 << 10, 1), (256 << 10, 128))


@dataclass(frozen=True)
class Segmentation:
    """The settings by which long blocks are cut into segments that are sent in a pipeline."""

    segment_bytes: int | None = None  # the longest segment; None for _SEGMENT, or _OF_TWO
    window: int = 4  # segments in flight; `of` changes it for hierarchical algorithms
    library: str = ""  # name and version of the MPI library, on which the window depends

    def of(
        self, algorithm: Algorithm, size: int, nodes: int, blocks: int, largest: int
    ) -> tuple[int, int]:
        """Return the number of segments of each block, `largest` in bytes, and of those in flight.

        Algorithms with a block per rank are not segmented, except for blocks too long for one
        message: their rounds overlap already (ring, 4 MB, 2 ranks: whole 0.60 ms, in segments
        0.84).  Hierarchical algorithms have shorter segments and more of them, so that the nodes
        work while the links are busy (allreduce, 4 MB, 2 nodes of 2 ranks at 1 Gbit/s, speed
        relative to the ring: 1.23 with segments of 1 MiB, 1.48 with 256 KiB and 8 in flight).

        In the allreduce ``hierarchical``, in which every local rank sends between the nodes, MPICH
        is faster with 3 segments in flight than with 8 (1, 4, 16 MB: 10.9, 38.8, 148 ms against
        11.3, 40.2, 159), Open MPI with 8 (13.9, 45.0, 168 ms against 15.3, 53.6, 249).  The other
        collectives, and ``hierarchical_leaders``, do not gain from fewer with MPICH.

        In shared memory, data go through slots in pieces.  Where they only move, a rank writes one
        piece while others read the one before (broadcast of 1 MiB, 2 ranks: 0.75 of the time in
        one piece).
        """
        limit, window = self.segment_bytes or (_OF_TWO if size == 2 else _SEGMENT), self.window
        if algorithm.memory is not None:
            if "pieces" not in algorithm.uses:
                return 1, window
            reduces = algorithm.contract.reduces
            if algorithm.collective == "alltoall":  # a piece for each of the others, side by side
                largest *= max(size - 1, 1)
            cuts = _REDUCED_PIECES if reduces else _SLOT_PIECES
            return max(1, *[min(most, -(-largest // piece)) for piece, most in cuts]), window
        if nodes > 1 and algorithm.local:
            return self.between_nodes(algorithm, largest)
        if blocks >= size:
            limit = _BLOCK_LIMIT
        segments = -(-largest // min(limit, _BLOCK_LIMIT))
        return max(1, min(STRANDS, segments)), window

    def between_nodes(self, algorithm: Algorithm, largest: int) -> tuple[int, int]:
        """Return the numbers as :meth:`of` does, for a hierarchical algorithm on several nodes.

        One with shared memory in the nodes has segments between its meetings only.
        """
        least, most = _BETWEEN_NODES
        # In two segments the nodes wait for the link: 1 MB with Open MPI was 1.36 times as fast as
        # the ring, and 1.56 times in four.
        limit = min(self.segment_bytes or _SEGMENT, max(least, min(most, largest // 4)))
        lanes = (algorithm.collective, algorithm.name.partition("/")[0]) == _FEWER
        few = lanes and self.library.startswith("MPICH")
        window = max(2, self.window - 1) if few else 2 * self.window
        return max(1, min(STRANDS, -(-largest // limit))), window

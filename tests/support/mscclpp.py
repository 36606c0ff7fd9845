"""MSCCL++ plans of a few operations, as the JSON that its language writes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Op = dict[str, Any]
NOP: Op = {"name": "nop"}


class Gpu:
    """A GPU with a channel of each type to each other one, and all their buffers."""

    def __init__(self, rank: int, size: int):
        self.rank, self.peers = rank, [peer for peer in range(size) if peer != rank]

    def words(self, name: str, peers: Iterable[int] | None = None, kind: str = "memory") -> Op:
        """Return a signal, wait or flush on the channels to some peers, by default all."""
        ids = [self.peers.index(p) for p in (self.peers if peers is None else peers)]
        return {"name": name, "channel_ids": ids, "channel_type": kind}

    def of(self, gpu: int, buffer: str, index: int, size: int = 1) -> dict[str, Any]:
        """Return the reference to chunks of a buffer."""
        if gpu == self.rank:
            return {"type": buffer, "index": index, "size": size}
        number = "ios".index(buffer) * len(self.peers) + self.peers.index(gpu)
        return {"buffer_id": number, "index": index, "size": size}

    def move(
        self, name: str, sources: list, targets: list, kind: str = "memory", **more: Any
    ) -> Op:
        """Return an operation between places, given as for `of`."""
        op = {"name": name, "src_buff": [self.of(*s) for s in sources]}
        op |= {"dst_buff": [self.of(*t) for t in targets], **more}
        return op if name in ("copy", "re") else op | {"channel_type": kind}

    def content(self, chunks: tuple[int, int, int], blocks: list[list[Op]]) -> dict[str, Any]:
        """Return the GPU with the operations of its thread blocks."""
        kinds, each = ("memory", "port"), list(range(len(self.peers)))
        every = list(range(3 * len(self.peers)))
        return {
            "id": self.rank,
            **dict(zip(("input_chunks", "output_chunks", "scratch_chunks"), chunks)),
            "threadblocks": [
                {
                    "id": t,
                    "ops": ops,
                    "channels": [{"channel_type": k, "channel_ids": each} for k in kinds],
                    "remote_buffer_refs": [
                        {"access_channel_type": k, "remote_buffer_ids": every} for k in kinds
                    ],
                }
                for t, ops in enumerate(blocks)
            ],
            "channels": [{"channel_type": k, "connected_to": self.peers} for k in kinds],
            "remote_buffers": [
                {"rank": peer, "type": buffer, "access_channel_types": list(kinds)}
                for buffer in "ios"
                for peer in self.peers
            ],
            "semaphores": [{"init_value": 0} for _ in range(2)],
        }


def plan(collective: str, inplace: bool, gpus: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Return a plan."""
    return {
        "name": f"{collective}_{len(gpus)}",
        "collective": collective,
        "protocol": "Simple",
        "inplace": inplace,
        "reuse_resources": False,
        "gpus": gpus,
        "num_threads_per_block": 1024,
        "use_double_scratch_buffer": False,
        "buffer_alignment": 16,
        "min_message_size": 0,
        "max_message_size": 2**64 - 1,
        **more,
    }


def allreduce(size: int) -> dict[str, Any]:
    """Return an allreduce in place: each GPU combines one chunk of all, and stores it in all."""
    gpus = []
    for rank in range(size):
        g = Gpu(rank, size)
        everywhere = [(rank, "i", rank), *((peer, "i", rank) for peer in g.peers)]
        ops = [
            *(g.words("rlxsignal"), g.words("rlxwait"), NOP),
            g.move("rres", everywhere, everywhere, reduce_op="sum"),
            *(NOP, g.words("signal"), g.words("wait"), NOP),
        ]
        gpus.append(g.content((size, size, 0), [ops]))
    return plan("allreduce", True, gpus)


def allgather(size: int, kind: str = "memory") -> dict[str, Any]:
    """Return an allgather whose GPUs store their chunk in all outputs."""
    gpus = []
    for rank in range(size):
        g = Gpu(rank, size)
        targets = [(peer, "o", rank) for peer in g.peers]
        ids = {"channel_ids": list(range(size - 1))} if kind == "port" else {}
        ops = [
            g.move("copy", [(rank, "i", 0)], [(rank, "o", rank)]),
            *(g.words("signal", kind=kind), g.words("wait", kind=kind), NOP),
            g.move("put", [(rank, "i", 0)] * len(targets), targets, kind, **ids),
            *(NOP, g.words("signal", kind=kind)),
            *([NOP, g.words("flush", kind=kind)] if kind == "port" else []),
            *(g.words("wait", kind=kind), NOP),
        ]
        gpus.append(g.content((1, size, 0), [ops]))
    return plan("allgather", False, gpus)


def alltoall(size: int, join: str = "semaphore", **more: Any) -> dict[str, Any]:
    """Return an alltoall through scratch memory, which a second thread block empties.

    The first one lets it begin by a semaphore, or by a barrier.
    """
    gpus = []
    for rank in range(size):
        g = Gpu(rank, size)
        barrier = {"name": "barrier", "barrier_id": 0, "num_threadblocks": 2}
        first, second = (
            [{"name": name, "semaphore_ids": [0]}] if join == "semaphore" else [barrier]
            for name in ("sem_release", "sem_acquire")
        )
        targets = [(peer, "s", rank) for peer in g.peers]
        sends = [
            *(g.words("rlxsignal"), g.words("rlxwait"), NOP),
            g.move("put", [(rank, "i", peer) for peer in g.peers], targets),
            *(NOP, g.words("signal"), g.words("wait"), NOP, *first),
        ]
        empties = [
            g.move("copy", [(rank, "i", rank)], [(rank, "o", rank)]),
            *(*second, NOP),
            *(g.move("copy", [(rank, "s", peer)], [(rank, "o", peer)]) for peer in g.peers),
        ]
        gpus.append(g.content((size, size, size), [sends, empties]))
    return plan("alltoall", False, gpus, **more)


def written(folder: Path, content: dict[str, Any], name: str = "plan.json") -> Path:
    """Write a plan to a file, and return its path."""
    path = folder / name
    path.write_text(json.dumps(content))
    return path

"""Guests: the records of ranks of another node, which is lost with what its ranks alone had."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..communicator.communicator import Communicator
from .vault import Vault


def host_of(groups: Sequence[Sequence[int]], rank: int) -> int:
    """Return the rank, of the node behind its own, that keeps a rank's records too.

    `groups` has the ranks of each node.
    """
    # Three nodes; the last one has a rank more::
    #
    #     node 0        node 1        node 2        node 0
    #     rank 0 -----> rank 2 -----> rank 4 -----> rank 0
    #     rank 1 -----> rank 3 -----> rank 5 -----> rank 1
    #                                 rank 6 -----> rank 0
    #
    node = next(n for n, ranks in enumerate(groups) if rank in ranks)
    behind = groups[(node + 1) % len(groups)]
    return behind[groups[node].index(rank) % len(behind)]


class Guests:
    """The vaults of ranks of another node in which this rank keeps their records.

    A record there has no share: the ranks of each node have all of what the ranks have alike.
    ``vault(rank)`` makes that of a rank.
    """

    def __init__(self, comm: Communicator, vault: Callable[[int], Vault]):
        groups, self._comm = comm.topology.groups, comm
        hosts = [host_of(groups, rank) for rank in range(comm.size)]
        self._host = hosts[comm.rank]
        # In the order in which their records come.
        here = [rank for rank, host in enumerate(hosts) if host == comm.rank]
        self.vaults: Mapping[int, Vault] = {rank: vault(rank) for rank in here}
        node = next(group for group in groups if comm.rank in group)
        self.on_this_node = sum(host in node for host in hosts)

    def exchange(self, step: int, parts: Sequence[bytes | memoryview], alone: int) -> None:
        """Send the head of this rank's record to its host, and keep those of others; collective.

        `alone` is how many objects are another one on each rank.
        """
        comm, length = self._comm, sum(memoryview(part).nbytes for part in parts)
        head = [np.array([length]), *(np.frombuffer(part, np.uint8) for part in parts)]
        mine = np.concatenate([part.view(np.uint8) for part in head])
        counts = [0] * comm.size
        counts[self._host] = mine.size
        # By messages: a rank that dies in a call of the library itself holds the others.
        got = comm.alltoall(mine, algorithm="linear", counts=counts)
        for vault in self.vaults.values():
            (length,), got = got[:8].view(np.int64), got[8:]
            vault.write(step, [got[:length].data], alone=alone, guest=1)
            got = got[length:]

    def close(self) -> None:
        """Close the vaults."""
        for vault in self.vaults.values():
            vault.close()

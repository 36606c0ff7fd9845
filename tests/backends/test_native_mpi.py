"""The library's own reduce_scatter with parts of one length, where mpi4py counts one part."""

import numpy as np
import pytest


@pytest.mark.mpi
@pytest.mark.parametrize("rows", [1, 3])
def test_native_reduce_scatter_of_even_parts(comm, rows):
    x = np.arange(rows * comm.size, dtype=np.float64) + comm.rank
    mine = comm.reduce_scatter(x, algorithm="native")
    ranks = sum(range(comm.size))
    begin = rows * comm.rank
    assert mine.tolist() == [comm.size * i + ranks for i in range(begin, begin + rows)]


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", ["native", "pairwise"])
def test_alltoall_in_place_again_with_other_data(comm, algorithm):
    x = np.zeros(2 * comm.size)
    for turn in range(4):
        x[:] = np.arange(x.size) + 100 * comm.rank + turn
        comm.alltoall(x, out=x, algorithm=algorithm)
        mine = (2 * comm.rank + turn, 2 * comm.rank + turn + 1)
        assert x.tolist() == [100 * peer + k for peer in range(comm.size) for k in mine]

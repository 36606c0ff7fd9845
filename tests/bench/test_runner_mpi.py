"""Measurements under mpiexec: what simulated ranks have not, symmetric memory."""

import pytest

from mpidist.bench import Settings, measure


@pytest.mark.one_node
def test_refusals_name_their_memory(comm):
    settings = Settings(sizes=[64], algorithms=["ring"], memory="both", limit=0.0, iterations=1)
    results = measure(comm, ["allreduce"], settings)
    assert not results.rows
    refused = {(one.candidate, one.memory) for one in results.unsupported}
    assert refused >= {("ring", "private"), ("ring", "symmetric")}
    assert all(" s" in one.reason and one.bytes for one in results.unsupported)

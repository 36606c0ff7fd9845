"""Buffers of a module, and what differs between replicas."""

import pytest

from mpidist.errors import ReplicasDiffer
from mpidist.parallel import DDP, ZeroOptimizer
from tests.support.training_kits import KITS, SMALL, assert_identical, batch


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kit", KITS)
def test_check_replicas_names_parameters_and_ranks(comm, kit):
    """One rank skips a step: the next comparison says which parameters differ, and where."""
    last, (x, labels) = comm.size - 1, batch()
    make, options = kit.optimizers()["sgd"]
    for every, zero, overlap in ((1, False, "polls"), (3, False, "none"), (2, True, "none")):
        net = kit.mlp()
        model = DDP(net, comm, check_replicas=every, overlap=overlap, **SMALL)
        optimizer = (
            ZeroOptimizer(make, model, **options) if zero else make(net.parameters(), **options)
        )
        names = [name for name, _ in model.reducer.grouping.named]

        def step(number, model=model, net=net, optimizer=optimizer, zero=zero):
            optimizer.zero_grad()
            kit.step(model, x, labels, 1.0)
            model.sync_gradients()
            if zero:  # its step is collective: something else has gone wrong on that rank
                optimizer.step()
            if zero and number == 1 and comm.rank == last:
                model.framework.values(model.reducer.grouping.named[2][1])[...] += 1
            elif not zero and (number != 1 or comm.rank != last):
                optimizer.step()

        raised = None
        for number in range(1, 2 * every + 2):
            try:
                step(number)
            except ReplicasDiffer as error:
                assert raised is None and number == every + (every == 1)
                raised = str(error)
                assert f"rank {comm.rank}: sync_gradients() number {number}" in raised
                wrong = names[2:3] if zero else names[:5]
                assert all(f"{name} on rank {last}" in raised for name in wrong)
                assert zero or f"and {len(names) - 5} more" in raised
                model.broadcast_parameters()
                optimizer.zero_grad()
        assert raised
        assert_identical(comm, kit, net)

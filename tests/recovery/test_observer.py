"""What is seen of a step without a call: forwards, steps of optimizers, DDPs, their gradients."""

import gc
from weakref import ref

import numpy as np
import pytest

import mpidist as md
from mpidist import nn
from mpidist.recovery.kept import Kept
from mpidist.recovery.observer import Observer


class Told:
    """Who is told of each DDP."""

    def __init__(self):
        self.ddps = []

    def noted(self, ddp):
        self.ddps.append(ref(ddp))


TOLD = Told()


def observed(net, sending=(), resumed=False):
    kept = {"net": Kept.of("net", net, False), "x": Kept.of("x", np.zeros(2), False)}
    return Observer(kept, list(sending), resumed, TOLD.noted)


def test_steps_and_unused_gradients_are_seen():
    def program(comm):
        net = nn.Linear(3, 2)
        optimizer, seen = nn.SGD(net.parameters(), 0.1), observed(net)
        model = md.DDP(net, comm, sync="manual")
        with model.no_sync():
            model.backward(model(np.ones((1, 3))))
        assert seen.unused_gradients() and not seen.stepped
        model.sync_gradients()
        optimizer.step()
        assert seen.stepped and not seen.unused_gradients()
        seen.committed(seen.now_sending())
        assert not seen.stepped
        seen.leave()
        optimizer.step()
        assert not seen.stepped

    md.run_simulated(1, program)


def test_buffers_are_those_before_the_first_forward_of_a_step():
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    net = torch.nn.BatchNorm1d(3)
    seen = observed(net)
    kept = seen._kept["net"]
    for commits in range(2):
        for _ in range(2):  # forwards
            net(torch.ones(4, 3))
        assert seen.forwarded and net.num_batches_tracked == 2 * commits + 2
        kept.set_buffers(kept.buffers)
        assert net.num_batches_tracked == 2 * commits
        for _ in range(2):
            net(torch.ones(4, 3))
        seen.committed([])
    seen.leave()


def test_buffers_that_the_ranks_have_alike_are_not_its_own():
    torch = pytest.importorskip("torch", reason="needs PyTorch")

    def program(comm):
        net = torch.nn.BatchNorm1d(3)
        seen = observed(net)
        assert list(seen.own_buffers()) == ["net"]
        md.DDP(net, comm, buffers="broadcast")
        alike = seen.own_buffers()
        seen.leave()
        return alike

    assert md.run_simulated(1, program) == [{}]


def test_resumed_wrapper_sends_as_the_one_before():
    def program(comm):
        def steps(seen, net, number):
            model = md.DDP(net, comm, bucket_bytes=64)
            for _ in range(number):
                model.backward(model(np.ones((1, 8))))
                model.sync_gradients()
            sending, alive = seen.now_sending(), seen.alive()
            model.close()
            return sending, alive == [model]

        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        first = observed(net)
        sending, alive = steps(first, net, 3)
        assert sending != [None] and alive
        first.leave()
        assert first.alive() == []
        again = observed(net, sending, resumed=True)
        same, _ = steps(again, net, 0)
        again.leave()
        anew = observed(net)
        other, _ = steps(anew, net, 0)
        anew.leave()
        return same == sending, other

    assert md.run_simulated(1, program) == [(True, [None])]  # ranks as threads would see all DDPs


def trained(model):
    model.backward(model(np.ones((1, 8))))
    model.sync_gradients()


def test_wrapper_that_is_given_up_is_not_kept():
    def program(comm):
        net = nn.Linear(8, 2)
        seen = observed(net)
        model = md.DDP(net, comm)
        trained(model)
        assert seen.now_sending() != [None]
        bucket = ref(model.buckets[0])
        del model
        net.zero_grad()
        gc.collect()
        found = seen.alive(), bucket()
        seen.leave()
        return found

    assert md.run_simulated(1, program) == [([], None)]


def test_wrapper_is_asked_how_it_sends_only_where_its_buckets_have_changed(monkeypatch):
    def program(comm):
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        seen = observed(net)
        model = md.DDP(net, comm, bucket_bytes=64)
        never = md.DDP(nn.Linear(2, 2), comm)
        trained(model)
        sent = seen.now_sending()
        asked, sending = [], md.DDP.sending
        monkeypatch.setattr(md.DDP, "sending", lambda of: asked.append(of) or sending(of))
        trained(model)
        assert seen.now_sending() == sent == [model.sending(), None] and asked == [model]
        grouping = model.reducer.grouping
        model.reducer.regroup(grouping.layout, ["ring"] * len(grouping.buckets))
        assert seen.now_sending()[0]["algorithms"] == ["ring"] * len(grouping.buckets)
        assert seen.now_sending()[1] is None and asked == [model, model]
        seen.leave()
        never.close()

    md.run_simulated(1, program)

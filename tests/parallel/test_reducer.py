"""The states of gradients, the phases of a step, and the transitions that are refused."""

import numpy as np
import pytest

from mpidist import run_simulated
from mpidist.errors import InvalidArgument
from mpidist.nn import SGD, Parameter
from mpidist.parallel import DDP
from mpidist.parallel.gradient import State
from mpidist.parallel.reducer import Phase
from mpidist.parallel.transport import average
from tests.support.training_kits import KITS, MANUAL, SMALLEST, batch, needs_torch, torch, two_heads

SMALL = {"bucket_bytes": 16, "first_bucket_bytes": 16}  # a bucket for each parameter


class Weights:
    def __init__(self, count=2):
        self.weights = [Parameter(np.ones(2)) for _ in range(count)]

    def parameters(self):
        return self.weights

    def backward(self, grad):
        """Return None: :func:`add` adds to gradients."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        assert state == {}


def states(model):
    return [gradient.state.value for gradient in model.reducer.gradients]


def add(model, *which):
    for k in which:
        model.module.weights[k].accumulate(np.full(2, model.comm.rank + 1.0))


def test_states_of_a_step():
    """Rank 0 uses the first parameter alone, nobody the third one."""

    def main(comm):
        model = DDP(Weights(3), comm, overlap="none", **SMALL)
        assert states(model) == ["received"] * 3 and model.reducer.phase is Phase.IDLE
        for _ in range(2):
            model.reducer.prepare()
            assert states(model) == ["empty"] * 3 and model.reducer.phase is Phase.IDLE
            add(model, 1)
            if comm.rank == 0:
                add(model, 0)
            first = "added" if comm.rank == 0 else "empty"
            assert states(model) == [first, "added", "empty"]
            assert model.reducer.phase is Phase.BACKWARD
            assert model.reducer.sync().tolist() == [comm.rank == 0, 1, 0]
            assert states(model) == ["received"] * 3 and model.reducer.phase is Phase.IDLE
            grads = [p.grad for p in model.parameters()]
            assert grads[0].tolist() == [0.5, 0.5] and grads[1].tolist() == [1.5, 1.5]
            assert grads[2] is None
            model.zero_grad()

    run_simulated(2, main)


def test_states_with_early_buckets():
    def main(comm):
        model = DDP(Weights(), comm, overlap="polls", sync="manual", **SMALL)
        for step in range(3):
            model.reducer.prepare()
            add(model, 1)
            early = step > 0  # the first step is observed
            assert states(model) == ["empty", "sent" if early else "added"]
            assert model.reducer.phase is (Phase.SENT if early else Phase.BACKWARD)
            assert [g.name for g in model.reducer.not_averaged()] == ["1"]
            add(model, 0)
            model.sync_gradients()
            model.zero_grad()

    run_simulated(2, main)


def test_addition_within_no_sync_to_a_sent_gradient():
    """The sum would miss it, or send a part of it."""

    def main(comm):
        model = DDP(Weights(), comm, overlap="polls", sync="manual", **SMALL)
        for _ in range(2):
            with model.no_sync():
                add(model, 0, 1)
            add(model, 0, 1)
            model.sync_gradients()
            assert all((p.grad == 3.0).all() for p in model.parameters())
            model.zero_grad()
        add(model, 0)
        said = rf"rank {comm.rank}: the gradient of 0 .* 2 times, .*within no_sync\(\) .* 1 are"
        with model.no_sync(), pytest.raises(InvalidArgument, match=said):
            add(model, 0)

    run_simulated(2, main)


def test_other_buckets_while_some_are_sent():
    def main(comm):
        model = DDP(Weights(), comm, overlap="polls", sync="manual", **SMALL)
        state = DDP(Weights(), comm).resume_state()
        for _ in range(2):
            add(model, 1, 0)
            pending = len(model.reducer.pending)
            if pending:
                said = f"rank {comm.rank}: the state has other buckets, and 2 buckets .*were sent"
                with pytest.raises(InvalidArgument, match=said):
                    model.load_state_dict(state)
            model.sync_gradients()
            assert all((p.grad == 1.5).all() for p in model.parameters())
            model.zero_grad()
        assert pending == 2

    run_simulated(2, main)


def test_regroup_keeps_the_counts_of_additions():
    """Step 1 counts the additions to each gradient.

    regroup(), which load_state_dict() calls for other buckets, keeps these counts, so in step 2 the
    merged bucket is sent early, at its last addition.
    """

    def main(comm):
        model = DDP(Weights(), comm, overlap="polls", sync="manual", **SMALL)
        add(model, 0, 1)
        model.sync_gradients()
        layout = model.reducer.grouping.layout
        model.reducer.regroup([tuple(i for bucket in layout for i in bucket)])
        add(model, 0)
        assert not model.reducer.pending
        add(model, 1)
        assert len(model.reducer.pending) == len(model.buckets) == 1
        model.sync_gradients()

    run_simulated(2, main)


def test_failed_sync_phase():
    def main(comm):
        def hook(bucket):
            if bucket.index == fails:
                raise ValueError("once")
            return comm.iallreduce(bucket.flat, op="mean", out=bucket.flat)

        model = DDP(Weights(), comm, overlap="none", sync="manual", hook=hook, **SMALL)
        model.reducer.prepare()
        add(model, 0)
        fails = 0  # nothing was sent: it may be repeated
        with pytest.raises(ValueError, match="once"):
            model.sync_gradients()
        assert model.reducer.phase is Phase.BACKWARD and states(model) == ["added", "empty"]
        fails = 1
        with pytest.raises(ValueError, match="once"):
            model.sync_gradients()
        assert model.reducer.phase is Phase.FAILED
        with pytest.raises(InvalidArgument, match="gradients of 0 and 1 more were not averaged"):
            SGD(model.parameters()).step()
        with pytest.raises(InvalidArgument, match=rf"rank {comm.rank}: .*ValueError: once"):
            model.sync_gradients()

    run_simulated(2, main)


def test_evaluation_between_backward_and_step():
    """A forward on one rank alone makes no averaged gradient unaveraged, and no collective call."""

    def main(comm):
        model = DDP(Weights(), comm, overlap="none", **SMALL)
        add(model, 0)
        model.backward(None)
        assert model.reducer.phase is Phase.AVERAGED and model.parameters()[1].grad is None
        if comm.rank == 0:
            model.reducer.prepare()
            assert states(model) == ["received", "empty"]
        model.sync_gradients()
        assert model.stats().steps == 1
        SGD(model.parameters(), 1.0).step()
        assert [p.grad is None for p in model.parameters()] == [False, True]

    run_simulated(2, main)


def test_assigned_gradient_of_an_evaluated_parameter():
    """Beside averaged ones: what a forward found as None and the user then sets is not averaged."""

    def main(comm):
        model = DDP(Weights(), comm, overlap="none", **SMALL)
        optimizer = SGD(model.parameters(), 1.0)
        add(model, 0)
        model.sync_gradients()
        model.reducer.prepare()
        model.parameters()[0].grad = model.parameters()[0].grad / 2  # of an averaged one
        optimizer.step()
        model.reducer.prepare()
        model.parameters()[1].grad = np.full(2, comm.rank)
        assert model.reducer.gradients[1].state is State.EMPTY
        with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: .*gradients of 1 were not"):
            optimizer.step()
        model.sync_gradients()
        optimizer.step()

    run_simulated(2, main)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kit", KITS)
def test_second_backward_to_sent_buckets_is_refused(comm, kit):
    model = DDP(kit.mlp(), comm, overlap="polls", **MANUAL)
    x, labels = batch()
    for _ in range(2):
        kit.step(model, x, labels, 1.0)
        model.sync_gradients()
        model.zero_grad()
    kit.step(model, x, labels, 1.0)
    with pytest.raises(InvalidArgument, match=rf"rank {comm.rank}: .*2 times.* 1 are.*no_sync"):
        kit.step(model, x, labels, 1.0)
    assert len(model.reducer.pending) == len(model.buckets)
    for bucket, sent in zip(model.buckets, model.reducer.pending, strict=True):  # each is whole
        sent.wait()
        bucket.check_received()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kit", KITS)
def test_sync_after_a_failed_one_is_refused(comm, kit):
    works = [0]

    def fails_once(bucket):
        if bucket.index == 1 and works[0] == 0:
            works[0] = 1
            raise ValueError("once")
        return average(bucket)

    model = DDP(kit.mlp(), comm, overlap="none", hook=fails_once, **MANUAL)
    x, labels = batch()
    kit.step(model, x, labels, 1.0)
    with pytest.raises(ValueError, match="once"):
        model.sync_gradients()
    model.zero_grad(set_to_none=False)
    kit.step(model, x, labels, comm.rank + 1.0)
    with pytest.raises(
        InvalidArgument, match=rf"rank {comm.rank}: .*sync_gradients\(\).*ValueError: once"
    ):
        model.sync_gradients()


@pytest.mark.parametrize("kit", KITS)
def test_forgotten_sync_is_logged(comm, kit, caplog):
    model = DDP(kit.mlp(), comm, **MANUAL)
    x, labels = batch()
    told = f"rank {comm.rank}: gradients were computed and forgotten without sync_gradients()"
    with caplog.at_level("WARNING", "mpidist"):
        kit.step(model, x, labels, 1.0)
        model.sync_gradients()
        model.zero_grad()
        kit.step(model, x, labels, 1.0)
        assert told not in caplog.text
        model.zero_grad()
        model(kit.inputs(x))
    assert (told in caplog.text) == (comm.size > 1)


@needs_torch
@pytest.mark.ranks(1, 2, 3)
def test_unused_parameters_have_no_gradient(comm):
    """Unless another rank has used them; with unused="zero" they have zeros."""
    for unused in ("skip", "zero"):
        model = DDP(two_heads(), comm, overlap="polls", unused=unused, **SMALLEST)
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(1, 3), comm.rank % 2).sum().backward()
            model.sync_gradients()
            for head in range(3):
                users = sum(rank % 2 == head for rank in range(comm.size))
                grad = model.module.heads[head].bias.grad
                if users or unused == "zero":
                    torch.testing.assert_close(grad, torch.full((1,), users / comm.size))
                else:
                    assert grad is None
        model.close()


@needs_torch
@pytest.mark.ranks(1, 2, 3)
def test_static_graph_is_agreed_upon_once(comm):
    model = DDP(two_heads(), comm, static_graph=True, overlap="none", **SMALLEST)
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(1, 3), comm.rank % 2).sum().backward()
        assert model.module.heads[2].bias.grad is None
        assert (model.module.heads[1].bias.grad is None) == (comm.size == 1)
    if comm.size > 1:
        said = rf"rank {comm.rank}: static_graph=True, .* has used heads.{comm.rank % 2}.weight"
        with pytest.raises(InvalidArgument, match=said):
            model(torch.ones(1, 3), 2).sum().backward()

"""Data-parallel training is that of one process: on any communicator, with any library."""

import copy
import pickle
import re
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from mpidist.errors import InvalidArgument, ReplicasDiffer, UnknownName
from mpidist.parallel import DDP, ZeroOptimizer
from mpidist.parallel.hooks import Compress, TopK
from mpidist.parallel.transport import average
from mpidist.topology import Grid
from tests.support.training_kits import batch, fingerprint, needs_ranks

STEPS = 50
SMALL = {"bucket_bytes": 1200, "first_bucket_bytes": 100}  # several buckets
MANUAL = {**SMALL, "sync": "manual"}


def assert_identical(comm, kit, model):
    assert len(set(comm.allgather_object(fingerprint(kit, model)))) == 1


def assert_close(kit, model, alone, tolerance=1e-12):
    for mine, reference in zip(kit.values(model), kit.values(alone), strict=True):
        np.testing.assert_allclose(mine, reference, rtol=0, atol=tolerance)


def train(comm, kit, model, optimizer, steps=STEPS, check=True, passes=1):
    """Train on this rank's part of a global batch that changes from step to step."""
    for step in range(steps):
        x, labels = batch(step)
        parts = [slice(comm.rank + k * comm.size, None, comm.size * passes) for k in range(passes)]
        optimizer.zero_grad()
        for part in parts[:-1]:
            with model.no_sync():
                kit.step(model, x[part], labels[part], comm.size / len(x))
        kit.step(model, x[parts[-1]], labels[parts[-1]], comm.size / len(x))
        model.sync_gradients()
        optimizer.step()
        if check:
            assert_identical(comm, kit, model)


def train_alone(kit, seed, optimizer_name, steps=STEPS):
    net = kit.mlp(seed)
    make, options = kit.optimizers()[optimizer_name]
    optimizer = make(net.parameters(), **options)
    for step in range(steps):
        x, labels = batch(step)
        optimizer.zero_grad()
        kit.step(net, x, labels, 1 / len(x))
        optimizer.step()
    return net


def equals_one_process(comm, kit, optimizer_name, overlap="none", passes=1, **options):
    net = kit.mlp(comm.rank)  # the wrapper gives all the weights of rank 0
    model = DDP(net, comm, overlap=overlap, **{**SMALL, **options})
    make, settings = kit.optimizers()[optimizer_name]
    train(comm, kit, model, make(net.parameters(), **settings), passes=passes)
    assert_close(kit, net, train_alone(kit, 0, optimizer_name))
    return model


def experts(step, rank):
    """The expert of a rank: in a third of the steps the same on all ranks; the last in one step."""
    return 2 if step == 1 else 0 if step % 3 == 0 else (step + rank) % 2


def a_mixture_of_experts(comm, kit, optimizer_name, overlap, zero):
    """What no rank has used in a step is left alone by momentum, as in one process."""
    steps, (make, settings) = 9, kit.optimizers()[optimizer_name]
    net, alone = kit.mixture(comm.rank), kit.mixture(0)
    model = DDP(net, comm, overlap=overlap, **SMALL)
    optimizer = (
        ZeroOptimizer(make, model, **settings) if zero else make(net.parameters(), **settings)
    )
    reference = make(alone.parameters(), **settings)
    for step in range(steps):
        x, labels = batch(step)
        for rank in range(comm.size):
            alone.chosen, part = experts(step, rank), slice(rank, None, comm.size)
            kit.step(alone, x[part], labels[part], 1 / len(x))
        reference.step()
        net.chosen, part = experts(step, comm.rank), slice(comm.rank, None, comm.size)
        with model.no_sync():
            kit.step(model, x[part][:2], labels[part][:2], comm.size / len(x))
        kit.step(model, x[part][2:], labels[part][2:], comm.size / len(x))
        model.sync_gradients()
        found = [grad is None for grad in kit.gradients(net)]
        assert found == [grad is None for grad in kit.gradients(alone)]
        optimizer.step()
        assert_identical(comm, kit, net)
        assert_close(kit, net, alone)
        reference.zero_grad()
        optimizer.zero_grad()


def automatic_overlap_ends_with_a_choice(comm, kit):
    model = equals_one_process(comm, kit, "momentum", "auto")
    stats = model.stats()
    assert stats.steps == STEPS
    assert stats.bytes == sum(p.nbytes for p in kit.values(model))
    if comm.size > 1:
        assert set(stats.trials) == {"none", "polls", "thread"}
        assert len(set(comm.allgather_object(stats.overlap))) == 1
        fastest = min(stats.trials, key=stats.trials.get)
        assert stats.overlap in ("none", fastest)
    assert stats.compute > 0 and stats.exposed > 0
    assert 0 <= stats.hidden <= stats.communication


def early_buckets_are_launched_in_backward(comm, kit, overlap):
    model = DDP(kit.mlp(), comm, overlap=overlap, **MANUAL)
    x, labels = batch()
    for step in range(3):
        model.zero_grad()
        kit.step(model, x, labels, 1.0)
        pending = len(model.reducer.pending)
        if comm.size > 1:
            assert pending == (len(model.buckets) if step else 0)  # the first step is observed
        model.sync_gradients()
    assert len(model.buckets) > 2


def nothing_is_copied(comm, kit):
    """Though gradients are forgotten in every step, as zero_grad() of PyTorch does."""
    net = kit.mlp()
    model = DDP(net, comm, overlap="none", **SMALL)
    make, settings = kit.optimizers()["sgd"]
    optimizer = make(net.parameters(), **settings)
    x, labels = batch()
    for _ in range(4):
        kit.step(model, x, labels, 1.0)
        model.sync_gradients()
        optimizer.step()
        optimizer.zero_grad()
    assert model.stats().copies == 0
    if comm.size > 1:  # a gradient that does not lie in its bucket is copied, and counted
        for p in net.parameters():
            p.grad = p.data * 0
        model.sync_gradients()
        assert model.stats().copies == len(list(net.parameters()))


@needs_ranks(2)
def a_second_backward_is_refused(comm, kit):
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


@needs_ranks(2)
def replaced_gradient_is_refused(comm, kit):
    model = DDP(kit.mlp(), comm, overlap="polls", **MANUAL)
    x, labels = batch()
    for step in range(2):
        model.zero_grad()
        kit.step(model, x, labels, 1.0)
        name, p = model.reducer.grouping.named[0]
        if step:  # the first step is observed only
            p.grad = None
            said = f"rank {comm.rank}: .* gradient of {name} .*overlap='none'"
            with pytest.raises(InvalidArgument, match=said):
                model.sync_gradients()
        else:
            model.sync_gradients()


def uneven_inputs(comm, kit, optimizer_name):
    """Rank r has r steps more than rank 0; the mean is over all ranks all the time."""
    net = kit.mlp(comm.rank)
    model = DDP(net, comm, **SMALL)
    make, settings = kit.optimizers()[optimizer_name]
    optimizer = make(net.parameters(), **settings)
    with model.join(optimizer) as joined:
        for step in range(2 + comm.rank):
            x, labels = batch(step)
            optimizer.zero_grad()
            kit.step(model, x[comm.rank :: comm.size], labels[comm.rank :: comm.size], 1.0)
            model.sync_gradients()
            optimizer.step()
    assert joined.first == ((0, 2) if comm.size > 1 else None)
    assert_identical(comm, kit, net)
    alone = kit.mlp(0)
    optimizer = make(alone.parameters(), **settings)
    for step in range(1 + comm.size):
        x, labels = batch(step)
        active = [r for r in range(comm.size) if step < 2 + r]
        mine = np.concatenate([np.arange(len(x))[r :: comm.size] for r in active])
        optimizer.zero_grad()
        kit.step(alone, x[mine], labels[mine], 1 / comm.size)
        optimizer.step()
    assert_close(kit, net, alone)


def join_without_an_optimizer(comm, kit):
    net = kit.mlp()
    model = DDP(net, comm, **SMALL)
    make, settings = kit.optimizers()["sgd"]
    optimizer = make(net.parameters(), **settings)
    with model.join():
        for step in range(4 - 2 * (comm.rank % 2)):
            x, labels = batch(step)
            optimizer.zero_grad()
            kit.step(model, x, labels, 1.0)
            model.sync_gradients()
            optimizer.step()
    assert_identical(comm, kit, net)


@needs_ranks(2)
def uneven_inputs_can_be_an_error(comm, kit):
    model = DDP(kit.mlp(), comm, **SMALL)
    x, labels = batch()
    with pytest.raises(
        InvalidArgument, match=rf"rank {comm.rank}: rank 1 .*\b1 step\b.*early='error'"
    ):
        with model.join(early="error"):
            for _ in range(3 if comm.rank != 1 else 1):
                model.zero_grad()
                kit.step(model, x, labels, 1.0)
                model.sync_gradients()
    assert float(comm.allreduce(1.0)) == comm.size


def join_with_unequal_steps(comm, kit):
    """Clipping that a finished rank does not do is an error; as part of step() it is not."""

    class Clipped:
        def __init__(self, model, optimizer):
            self.model, self.optimizer = model, optimizer

        def step(self):
            self.model.clip_gradients(0.01)
            self.optimizer.step()

        def zero_grad(self):
            self.optimizer.zero_grad()

    for whole in (True, False):
        net = kit.mlp()
        model = DDP(net, comm, unused="error", **SMALL)
        make, settings = kit.optimizers()["sgd"]
        optimizer = Clipped(model, make(net.parameters(), **settings))
        given = optimizer if whole else optimizer.optimizer
        told = pytest.raises(
            InvalidArgument, match=rf"rank {comm.rank}: join\(\): .*rank 0: 0\.weight on rank"
        )
        with nullcontext() if whole or comm.size == 1 else told, model.join(given):
            for step in range(1 + comm.rank):
                x, labels = batch(step)
                kit.step(model, x, labels, 1.0)
                model.sync_gradients()
                optimizer.step()
                optimizer.zero_grad()
        if whole:
            assert_identical(comm, kit, net)


def clipping_is_by_the_norm_of_all(comm, kit):
    net, alone = kit.mlp(), kit.mlp()
    model = DDP(net, comm, **SMALL)
    x, labels = batch()
    kit.step(model, x[comm.rank :: comm.size], labels[comm.rank :: comm.size], comm.size)
    kit.step(alone, x, labels, 1.0)
    model.sync_gradients()
    expected = np.sqrt(sum((g**2).sum() for g in kit.gradients(alone)))
    assert model.clip_gradients(0.5) == pytest.approx(expected, rel=1e-12)
    for mine, whole in zip(kit.gradients(net), kit.gradients(alone), strict=True):
        np.testing.assert_allclose(mine, whole * 0.5 / expected, rtol=1e-9, atol=1e-15)
    assert model.clip_gradients(10.0) == pytest.approx(0.5)  # below: nothing changes
    for wrong in (0, "a", None, True, float("nan")):
        with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: max_norm={wrong!r}: "):
            model.clip_gradients(wrong)


def loop(comm, kit, overlap, when, to_none, explicit):
    """Train without, or with, calls of sync_gradients(); zero_grad() at a place of the loop."""
    net = kit.mlp(comm.rank)
    model = DDP(net, comm, overlap=overlap, **SMALL)
    make, settings = kit.optimizers()["adam"]
    optimizer = make(net.parameters(), **settings)
    for step in range(8):
        x, labels = batch(step)
        part = slice(comm.rank, None, comm.size)
        if when == "begin":
            model.zero_grad(to_none)
        elif when == "between":
            model(kit.inputs(x[part]))
            model.zero_grad(to_none)
        kit.step(model, x[part], labels[part], comm.size / len(x))
        for _ in range(explicit):
            model.sync_gradients()
        optimizer.step()
        if when == "end":
            model.zero_grad(to_none)
    assert_identical(comm, kit, net)  # ranks that once differ stay apart
    assert model.stats().steps == 8
    return net


def backward_averages(comm, kit, overlap):
    """The same bits as with calls of sync_gradients(), one or two, and as one process."""
    alone = train_alone(kit, 0, "adam", steps=8)
    for when in ("begin", "between", "end"):
        for to_none in (True, False):
            nets = [loop(comm, kit, overlap, when, to_none, explicit) for explicit in (0, 1, 2)]
            assert_close(kit, nets[0], alone)
            assert len({fingerprint(kit, net) for net in nets}) == 1


def backward_passes_add_up(comm, kit, overlap):
    """Several in a step, each averaged by itself, or all but the last within no_sync()."""
    x, labels = batch()
    part, scale = slice(comm.rank, None, comm.size), comm.size / len(x)
    alone = kit.mlp(0)
    for _ in range(3):
        kit.step(alone, x, labels, 1 / len(x))
    for held_back in (0, 2):
        net = kit.mlp(comm.rank)
        model = DDP(net, comm, overlap=overlap, **SMALL)
        for _ in range(4):
            model.zero_grad()
            for number in range(3):
                with model.no_sync() if number < held_back else nullcontext():
                    kit.step(model, x[part], labels[part], scale)
            for mine, whole in zip(kit.gradients(net), kit.gradients(alone), strict=True):
                np.testing.assert_allclose(mine, whole, rtol=0, atol=1e-12)


def unaveraged_gradients_stop_an_optimizer(comm, kit):
    net, other = kit.mlp(), kit.mlp()
    model = DDP(net, comm, overlap="none", **MANUAL)
    make, settings = kit.optimizers()["sgd"]
    optimizer, stranger = (make(x.parameters(), **settings) for x in (net, other))
    x, labels = batch()
    said = f"rank {comm.rank}: step.* gradients of 0.weight and 5 more were not averaged"
    for _ in range(2):
        kit.step(model, x, labels, comm.rank + 1.0)
        before = fingerprint(kit, net)
        with pytest.raises(InvalidArgument, match=said):
            optimizer.step()
        assert fingerprint(kit, net) == before
        stranger.step()  # has none of these gradients
        model.sync_gradients()
        optimizer.step()
        assert_identical(comm, kit, net)
        kit.step(model, x, labels, comm.rank + 1.0)
        optimizer.zero_grad()  # the step is given up
        optimizer.step()
    model.sync_gradients()
    model.zero_grad()
    with model.no_sync():
        kit.step(model, x, labels, 1.0)
        optimizer.step()  # training of this rank alone
    with pytest.raises(InvalidArgument, match=said):
        optimizer.step()
    model.close()
    optimizer.step()
    model = DDP(net, comm, **MANUAL)
    zero = ZeroOptimizer(make, model, **settings)
    kit.step(model, x, labels, 1.0)
    with pytest.raises(InvalidArgument, match=said):
        zero.step()
    model.sync_gradients()
    zero.step()


def a_forgotten_sync_is_told(comm, kit, caplog):
    model = DDP(kit.mlp(), comm, **MANUAL)
    x, labels = batch()
    with caplog.at_level("WARNING", "mpidist"):
        kit.step(model, x, labels, 1.0)
        model.sync_gradients()
        model.zero_grad()
        kit.step(model, x, labels, 1.0)
        assert "sync_gradients" not in caplog.text
        model.zero_grad()
        model(kit.inputs(x))
    told = f"rank {comm.rank}: gradients were computed and forgotten without sync_gradients()"
    assert (told in caplog.text) == (comm.size > 1)


def a_closed_wrapper_leaves_the_module_alone(comm, kit):
    net = kit.mlp()
    model = DDP(net, comm, overlap="polls", **SMALL)
    x, labels = batch()
    for _ in range(2):
        kit.step(model, x, labels, 1.0)
        model.sync_gradients()
        model.zero_grad()
    model.close()
    for _ in range(2):  # twice without a sync: nobody minds
        kit.step(net, x, labels, comm.rank + 1.0)
    gradients = [np.array(g) for g in kit.gradients(net)]
    alone = kit.mlp()
    kit.step(alone, x, labels, 2 * (comm.rank + 1.0))
    for mine, reference in zip(gradients, kit.gradients(alone), strict=True):
        np.testing.assert_allclose(mine, reference, rtol=1e-12, atol=1e-12)
    assert float(comm.allreduce(1.0)) == comm.size


def replicas_of_a_stage_on_a_grid(comm, kit):
    """Each stage of a pipeline averages over its own replicas."""
    for pipe in (p for p in range(1, comm.size + 1) if comm.size % p == 0):
        grid = Grid(comm, pipe=pipe)
        net = kit.mlp(comm.rank)
        model = DDP(net, grid.data, **SMALL)
        make, settings = kit.optimizers()["sgd"]
        train(grid.data, kit, model, make(net.parameters(), **settings), steps=3)
        reference = train_alone(kit, grid.pipe_index * grid.shape[0], "sgd", steps=3)
        assert_close(kit, net, reference)


def replicas_that_differ_are_named(comm, kit):
    """One rank skips a step: the next comparison says which parameters differ, and where."""
    if comm.size == 1:
        pytest.skip("needs at least 2 ranks")
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


def join_without_optimizer(comm, kit):
    """In join() without an optimizer the parameters of finished ranks stay behind, till its end."""
    make, options = kit.optimizers()["sgd"]
    for given in (True, False):
        net = kit.mlp()
        model = DDP(net, comm, check_replicas=1, **SMALL)
        optimizer = make(net.parameters(), **options)
        with model.join(optimizer if given else None):
            for step in range(1 + comm.rank):
                x, labels = batch(step)
                kit.step(model, x, labels, 1.0)
                model.sync_gradients()
                optimizer.step()
                optimizer.zero_grad()
        assert_identical(comm, kit, net)


def unused_on_the_last_rank(comm, kit):
    """An error on all ranks, also if rank 0 has used every parameter."""
    net, last, (x, labels) = kit.mlp(), comm.size - 1, batch()
    model = DDP(net, comm, unused="error", **SMALL)
    for _ in range(2):
        model.zero_grad()
        with pytest.raises(InvalidArgument) as caught:
            if comm.rank != last:
                kit.step(model, x, labels, 1.0)
            model.sync_gradients()
        assert f"rank {comm.rank}: parameters without a gradient" in str(caught.value)
        for name, _ in model.reducer.grouping.named:
            assert f"{name} (on rank {last})" in str(caught.value)


def wrong_options_are_refused(comm, kit):
    for option, value in (
        ("overlap", "sometimes"),
        ("buffers", "mine"),
        ("unused", "maybe"),
        ("sync", "soon"),
        ("algorithm", "rung"),
        ("bucket_bytes", 0),
        ("init_sync", "no"),
        ("check_replicas", -1),
        ("check_replicas", 1.5),
        ("check_replicas", True),
    ):
        with pytest.raises(InvalidArgument, match=rf"\b{option}[ =]{re.escape(repr(value))}"):
            DDP(kit.mlp(), comm, **{option: value})


def what_is_no_module_is_refused(comm, kit):
    net = kit.mlp()
    first = DDP(net, comm)
    for module, said in ((first, "DDP"), (list(net.parameters()), "list")):
        with pytest.raises(InvalidArgument, match=rf"rank {comm.rank}: module .*\b{said}\b"):
            DDP(module, comm)
    first.close()
    with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: hook='float16': "):
        DDP(net, comm, hook="float16")
    with pytest.raises(InvalidArgument, match=rf"rank {comm.rank}: hook=Compress\b.*Compress\("):
        DDP(net, comm, hook=Compress)
    for strange in (None, SimpleNamespace(rank=0, size=1)):  # as one of mpi4py
        with pytest.raises(InvalidArgument, match=rf"^comm={re.escape(repr(strange))}: "):
            DDP(net, strange)
    model = DDP(net, comm)
    net.note = 1
    with pytest.raises(AttributeError, match="'DDP' object has no attribute 'note', .*module.note"):
        _ = model.note
    with pytest.raises(AttributeError, match="'DDP' object has no attribute 'nota'$"):
        _ = model.nota
    with pytest.raises(
        InvalidArgument,
        match=rf"rank {comm.rank}: join.* optimizer .*\bint\b.*\bstep\b.*\bzero_grad\b",
    ):
        with model.join(3):
            pass
    for state in (3, {"module": net.state_dict(), "sending": {}}):
        with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: state "):
            model.load_state_dict(state)


def a_parameter_has_one_wrapper(comm, kit):
    net = kit.mlp()
    model = DDP(net, comm)
    said = rf"rank {comm.rank}: .*0\.weight, 0\.bias, .*\bDDP\b"
    with pytest.raises(InvalidArgument, match=said):
        DDP(net, comm)
    if kit.name == "torch":
        with pytest.raises(
            InvalidArgument, match=rf"rank {comm.rank}: .*\bweight, bias\b.*\bDDP\b"
        ):
            DDP(net[2], comm)
    model.close()
    with pytest.raises(UnknownName) as failed:  # whose traceback holds what was not made
        DDP(net, comm, algorithm="rung")
    again = DDP(net, comm)
    assert failed.tb
    again.close()
    DDP(net, comm).close()


@needs_ranks(2)
def arguments_are_the_same_everywhere(comm, kit):
    for name, here, there in (
        ("overlap", "polls", "none"),
        ("bucket_bytes", 64, 128),
        ("buffers", "keep", "average"),
        ("algorithm", "ring", "linear"),
        ("hook", TopK(), None),
        ("init_sync", True, False),
    ):
        with pytest.raises(InvalidArgument, match=f"rank 1 has {name}=.* where rank 0 has"):
            DDP(kit.mlp(), comm, **{name: there if comm.rank else here})


@needs_ranks(2)
def what_a_hook_gives_is_looked_at(comm, kit):
    x, labels = batch()
    for overlap in ("none", "polls", "thread"):
        model = DDP(kit.mlp(), comm, overlap=overlap, hook=lambda bucket: bucket.flat)
        said = f"rank {comm.rank}: hook .*ndarray.* bucket 0: .*Work"
        with pytest.raises(InvalidArgument, match=said):
            kit.step(model, x, labels, 1.0)
            model.sync_gradients()


@needs_ranks(2)
def failed_sync(comm, kit):
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


def copied_ddp_is_refused(comm, kit):
    net = kit.mlp()
    model = DDP(net, comm, overlap="polls", **SMALL)
    x, labels = batch()
    kit.step(copy.deepcopy(net), x, labels, 1.0)
    assert not model.reducer.touched.any()
    optimizer = kit.optimizers()["sgd"]
    for whole in (model, ZeroOptimizer(optimizer[0], model, **optimizer[1])):
        for act in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(
                InvalidArgument, match=f"rank {comm.rank}: .*{type(whole).__name__}"
            ):
                act(whole)


def a_forward_alone_moves_nothing(comm, kit):
    """A model that is only evaluated in a step has no gradient: zeros would move its momentum."""
    nets = [kit.mlp(1), kit.mlp(2)]
    trained, evaluated = (DDP(net, comm, overlap="none", **SMALL) for net in nets)
    make, settings = kit.optimizers()["adam"]
    both = make([*nets[0].parameters(), *nets[1].parameters()], **settings)
    x, labels = batch()
    for step in range(4):
        before = fingerprint(kit, nets[1])
        if step % 2:  # a target, and a validation between backward and step()
            evaluated(kit.inputs(x))
        else:
            kit.step(evaluated, x, labels, 1.0)
        kit.step(trained, x, labels, 1.0)
        evaluated(kit.inputs(x))
        both.step()
        assert (fingerprint(kit, nets[1]) == before) == bool(step % 2)
        assert all((grad is None) == bool(step % 2) for grad in kit.gradients(nets[1]))
        both.zero_grad()


CASES = [
    a_forward_alone_moves_nothing,
    automatic_overlap_ends_with_a_choice,
    nothing_is_copied,
    a_second_backward_is_refused,
    replaced_gradient_is_refused,
    join_without_an_optimizer,
    uneven_inputs_can_be_an_error,
    join_with_unequal_steps,
    what_is_no_module_is_refused,
    a_parameter_has_one_wrapper,
    arguments_are_the_same_everywhere,
    what_a_hook_gives_is_looked_at,
    failed_sync,
    copied_ddp_is_refused,
    clipping_is_by_the_norm_of_all,
    a_closed_wrapper_leaves_the_module_alone,
    replicas_of_a_stage_on_a_grid,
    replicas_that_differ_are_named,
    join_without_optimizer,
    unused_on_the_last_rank,
    unaveraged_gradients_stop_an_optimizer,
    wrong_options_are_refused,
]
ONE_PROCESS = [  # optimizer, overlap, backward passes in a step, options
    ("sgd", "none", 1, {"algorithm": "rabenseifner"}),
    ("momentum", "polls", 2, {}),
    ("momentum", "thread", 1, {"algorithm": "ring"}),
    ("adam", "thread", 1, {}),
    ("adam", "polls", 3, {"algorithm": "tree:2"}),
]

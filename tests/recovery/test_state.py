"""States: what is kept at a commit, refused before it, and restored on other ranks."""

import pickle
import random
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest

import mpidist as md
from mpidist import nn
from mpidist.recovery.packing import from_bytes


def a_net(seed=0):
    rng = np.random.default_rng(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    for p in net.parameters():
        p.data[...] = rng.normal(size=p.data.shape)
    return net


class Counted(nn.Linear):
    """A layer with a buffer, in which forwards count."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.seen = np.zeros(1)

    def named_buffers(self):
        return [("seen", self.seen)]

    def forward(self, x):
        self.seen += 1
        return super().forward(x)


def weights(net):
    return [p.data.tobytes() for p in net.parameters()]


@pytest.mark.parametrize(
    "objects, text",
    [
        ({"x": 3}, "x has type int, which cannot be restored: expected an object with state_dict"),
        ({"x": [np.zeros(2)]}, "x has type list, which cannot be restored"),
        ({"x": object()}, "x has type object"),
        ({"x": np.array([object()])}, "x has type ndarray: expected arrays"),
        ({"x": np.broadcast_to(0.0, 2)}, "x cannot be restored: assignment destination is read"),
        ({"x": nn.Linear}, "x has type type, which cannot be restored"),
        ({"x": np.zeros(2), "per_rank": ["y"]}, r"per_rank=\['y'\]: expected names of objects: x"),
        ({"x": np.zeros(2), "copies": "yes"}, "copies='yes': expected True, False or None"),
        ({"x": np.zeros(2), "per_rank": "x", "copies": False}, "copies=False: x is another one on"),
    ],
)
def test_what_cannot_be_restored_is_named_at_once(objects, text):
    with pytest.raises(md.InvalidArgument, match=text):
        md.State(**objects)


def test_state_that_cannot_be_kept_is_named_at_once():
    odd = SimpleNamespace(state_dict=lambda: {"f": lambda: 0}, load_state_dict=lambda state: None)
    with pytest.raises(md.InvalidArgument, match="odd: its state cannot be kept"):
        md.State(odd=odd)


def test_wrappers_belong_inside():
    def program(comm):
        with pytest.raises(md.InvalidArgument, match="net is a DDP, which holds a communicator"):
            md.State(net=md.DDP(a_net(), comm))

    md.run_simulated(2, program)


def test_commit_and_keep_outside():
    state = md.State(x=np.zeros(2))
    with pytest.raises(md.InvalidArgument, match="State.commit: expected inside of the function"):
        state.commit()
    with pytest.raises(md.InvalidArgument, match="State.keep: expected inside of the function"):
        state.keep("y", np.zeros(2))


def test_copies_only_where_they_are_needed():
    assert not md.State(x=np.zeros(2), rng=np.random.default_rng(0)).copies
    assert not md.State(rng=random.Random(), per_rank=["rng"]).copies  # generators always are
    assert md.State(x=np.zeros(2), per_rank=["x"]).copies
    assert md.State(x=np.zeros(2), copies=True).copies


def test_generator_used_after_the_last_call_is_named():
    def program(comm):
        rng, x = np.random.default_rng(comm.rank), np.zeros(2)
        state = md.State(x=x, rng=rng)
        state.begin(comm, {})
        rng.random()
        comm.allreduce(x)
        state.commit()
        comm.allreduce(x)
        rng.random()
        with pytest.raises(md.InvalidArgument, match="a random number generator was used after"):
            state.commit()
        assert state.step == 1
        state.end()

    md.run_simulated(2, program)


def test_values_that_cannot_be_kept_are_named():
    def program(comm):
        state = md.State(x=np.zeros(2))
        state.begin(comm, {})
        text = rf"rank {comm.rank}: commit: f has type function, .*: expected a number, a string"
        with pytest.raises(md.InvalidArgument, match=text):
            state.commit(epoch=3, f=lambda: 0)
        state.commit(epoch=3)
        assert state.values == {"epoch": 3} and state.step == 1
        state.end()

    md.run_simulated(2, program)


class Rated:
    """An optimizer with a rate, which counts how often it is asked for what it has not."""

    def __init__(self, **group):
        self.param_groups, self.asked = [{"params": [], **group}], 0

    def __getattr__(self, name):
        self.asked += 1
        raise AttributeError(name)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def test_commit_asks_for_no_attribute_that_an_object_lacks_and_pickles_nothing_plain(monkeypatch):
    def program(comm):
        optimizer = Rated(lr=0.1, betas=(0.9, 0.99))
        state = md.State(optimizer=optimizer)
        state.begin(comm, {})
        comm.allreduce(1)
        optimizer.asked = 0
        with monkeypatch.context() as patch:
            patch.setattr(pickle, "dumps", None)
            patch.setattr("mpidist.recovery.state.options_of", None)  # which of its group is a rate
            state.commit(epoch=3, name="a")
        assert not optimizer.asked and state.step == 1
        state.end()

    md.run_simulated(1, program)


@pytest.mark.parametrize("within", [lambda x: 1, lambda x: [x], lambda x: (1, ([x],))])
def test_what_changes_in_a_value_or_a_rate_behind_commit_is_not_kept(within):
    def program(comm):
        inner = [1]
        optimizer = Rated(betas=(0.9, within(inner)))
        state = md.State(optimizer=optimizer)
        state.begin(comm, {})
        state.commit(total=within(inner))
        inner.append(2)
        optimizer.param_groups[0]["betas"] = 0
        state.leave()
        state.begin(comm, {})
        assert state.values == {"total": within([1])}
        assert optimizer.param_groups[0]["betas"] == (0.9, within([1]))
        state.end()

    md.run_simulated(1, program)


def test_unlike_states_are_named():
    def program(comm):
        objects = {"x": np.zeros(2)} if comm.rank else {"y": np.zeros(2)}
        with pytest.raises(md.InvalidArgument, match="expected the same objects on all ranks"):
            md.State(**objects).begin(comm, {})

    md.run_simulated(2, program)


def a_step(comm, state, x, rng, rows):
    """Change all that there is, each in its place of a step."""
    noise = rng.random()
    total = comm.allreduce(x.sum() + noise)
    x += total
    if rows is not None:
        rows += total + comm.rank
    state.commit(total=float(total))


@pytest.mark.parametrize("copies", [None, True])
@pytest.mark.parametrize("behind", [False, True])
def test_replaced_rank_has_the_state_of_the_lost_one(copies, behind):
    """Rank 1 of 3 is lost, and another one takes its place: the bits are those without a loss.

    If it is `behind`, it is lost within a step that rank 2 has completed, and rank 0 has not.
    """

    def undisturbed(comm):
        x, rng = np.arange(4.0), np.random.default_rng(comm.rank)
        rows = np.full(3, float(comm.rank)) if copies else None
        state = md.State(x=x, rng=rng, copies=copies)
        state.begin(comm, {})
        if copies:
            state.keep("rows", rows, per_rank=True)
        for _ in range(5):
            a_step(comm, state, x, rng, rows)
        state.end()
        return x.tobytes(), rng.random(), None if rows is None else rows.tobytes()

    def disturbed(comm):
        first, second = comm.split(0), comm.split(0)
        x, rng = np.arange(4.0), np.random.default_rng(comm.rank)
        rows = np.full(3, float(comm.rank)) if copies else None
        state = md.State(x=x, rng=rng, copies=copies)
        state.begin(first, {})
        if copies:
            state.keep("rows", rows, per_rank=True)
        for _ in range(2):
            a_step(first, state, x, rng, rows)
        if behind:
            total = first.allreduce(x.sum() + rng.random())
            if first.rank == 2:
                x += total
                if rows is not None:
                    rows += total + 2
                state.commit(total=float(total))
        lost = state
        if comm.rank == 1:  # this thread is another rank from here on
            x, rng = np.zeros(4), np.random.default_rng(99)
            rows = np.zeros(3) if copies else None
            state = md.State(x=x, rng=rng, copies=copies)
        lost.leave()
        if comm.rank != 1:
            state.leave()
        state.begin(second, {1: "was lost"})
        assert state.lost == {1: "was lost"} and state.generation == 1
        assert state.step == (3 if behind and not copies else 2)
        if copies:
            rows = state.keep("rows", np.zeros(3), per_rank=True)
            assert sorted(state.parts("rows")) == [0, 1, 2]
        while state.step < 5:
            a_step(second, state, x, rng, rows)
        values = state.values
        state.end()
        return x.tobytes(), rng.random(), None if rows is None else rows.tobytes(), values

    expected = md.run_simulated(3, undisturbed)
    found = md.run_simulated(3, disturbed)
    assert [entry[:3] for entry in found] == expected
    assert len({entry[3]["total"] for entry in found}) == 1


@pytest.mark.parametrize("copies", [None, True])
def test_fewer_ranks_go_on_with_what_is_left(copies):
    def program(comm):
        state = md.State(x=np.zeros(2), rng=np.random.default_rng(comm.rank), copies=copies)
        x = state._kept["x"].value
        state.begin(comm, {})
        rows = np.full(2, comm.rank)
        if copies:
            state.keep("rows", rows, per_rank=True)
        x += comm.allreduce(1.0)
        state.commit()
        state.leave()
        left = comm.split(None if comm.rank == 1 else 0)
        if left is None:
            return None
        state.begin(left, {1: "was lost"})
        assert (left.size, state.step) == (2, 1) and (x == 3).all()
        if copies:
            assert {r: rows.tolist() for r, rows in state.parts("rows").items()} == {
                0: [0, 0],
                1: [1, 1],
                2: [2, 2],
            }
            kept = state.keep("rows", np.full(2, 7), per_rank=True)
            assert (kept == 7).all()  # they are dealt out anew
        state.end()
        return state.step

    assert md.run_simulated(3, program) == [1, None, 1]


def test_who_is_new_gets_hyperparameters_and_moments():
    """Also those of optimizers that are attributes, and no part of a state."""

    def program(comm):
        net = a_net(comm.rank)
        optimizer = nn.Adam(net.parameters(), 0.1)
        state = md.State(net=net, optimizer=optimizer)
        again = comm.split(0)
        state.begin(comm, {})
        for p in net.parameters():
            p.data[...] = 1
            p.grad = comm.allreduce(np.ones_like(p.data))
        optimizer.step()
        optimizer.learning_rate = 0.025
        state.commit()
        state.leave()
        if comm.rank == 1:
            net = a_net(7)
            optimizer = nn.Adam(net.parameters(), 0.1)
            state = md.State(net=net, optimizer=optimizer)
        state.begin(again, {})
        assert all(p.grad is None for p in net.parameters())
        for p in net.parameters():
            p.grad = np.ones_like(p.data)
        optimizer.step()
        state.end()
        return weights(net), optimizer.learning_rate

    found = md.run_simulated(2, program)
    assert found[0] == found[1] and found[0][1] == 0.025


def test_second_loss_before_all_have_begun():
    """A rank that came through the begin, and one that did not, agree on what counts."""

    def program(comm):
        first, second, third = (comm.split(0) for _ in range(3))
        x, rng = np.zeros(2), np.random.default_rng(comm.rank)
        state = md.State(x=x, rng=rng)
        state.begin(first, {})
        rng.random()
        x += first.allreduce(1.0)
        state.commit()
        after = rng.bit_generator.state
        state.leave()
        state.begin(second, {})
        if comm.rank == 0:  # as if the last exchange had not reached it
            state._last, state._next = None, state._last
        state.leave()
        rng.random()
        state.begin(third, {})
        assert rng.bit_generator.state == after and state.step == 1 and state.generation == 2
        state.end()

    md.run_simulated(3, program)


def test_optimizer_without_its_model_is_named_by_the_first_commit():
    """Not where the model comes later, by `keep`."""

    def program(comm):
        net = a_net()
        state = md.State(optimizer=nn.Adam(net.parameters()))
        state.begin(comm, {})
        with pytest.raises(md.InvalidArgument, match=f"rank {comm.rank}: commit: optimizer has"):
            state.commit()
        state.keep("net", net)
        state.commit()
        assert state.step == 1
        state.end()

    md.run_simulated(2, program)


@pytest.mark.parametrize("copies", [None, True])
def test_buffers_changed_behind_the_last_call_are_named_unless_they_are_copied(copies):
    """A spare would get those of the lost rank, as they were before that call."""
    if find_spec("torch") is None:
        pytest.skip("needs PyTorch")
    import torch

    def program(comm):
        net = torch.nn.BatchNorm1d(3)
        ema = torch.optim.swa_utils.AveragedModel(net)
        state = md.State(net=net, ema=ema, copies=copies)
        state.begin(comm, {})
        net(torch.ones(4, 3))
        comm.allreduce(1)
        if copies:
            ema.update_parameters(net)
        state.commit()
        state.leave()
        state.begin(comm.split(0), {})
        state._comm.allreduce(1)
        ema.update_parameters(net)
        if copies:
            state.commit()
        else:
            with pytest.raises(md.InvalidArgument, match="commit: buffers of ema were changed"):
                state.commit()
        state.end()

    md.run_simulated(2, program)


def test_average_of_weights_that_begins_later_is_named():
    """As with SWA from some epoch on."""
    torch = pytest.importorskip("torch", reason="needs PyTorch")

    def program(comm):
        net = torch.nn.Linear(2, 2)
        ema = torch.optim.swa_utils.AveragedModel(net)
        state = md.State(net=net, ema=ema)
        state.begin(comm, {})
        for _ in range(6):
            comm.allreduce(1)
            state.commit()
        comm.allreduce(1)
        ema.update_parameters(net)
        with pytest.raises(md.InvalidArgument, match="commit: buffers of ema were changed"):
            state.commit()
        state.end()

    md.run_simulated(2, program)


def test_one_node_is_left_of_two(tmp_path, monkeypatch):
    """Then nothing is sent to another one, in a communicator that was left."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("MPIDIST_VAULTS", str(tmp_path))

    def program(comm):
        state = md.State(u=np.zeros(3), copies=True)
        state.begin(comm, {})
        comm.allreduce(1)
        state.commit()
        assert any("-by-" in path.name for path in tmp_path.iterdir())
        left = comm.split(comm.rank)
        state.leave()
        if comm.rank == 0:
            state.begin(left, {1: "was lost"})
            comm.free()
            state.commit()
            assert state.step == 2
        state.end()

    md.run_simulated(2, program, nodes="ab")


def test_step_without_a_call_is_a_barrier():
    """Else a rank could be many steps ahead of another, which would be lost with its records."""

    def program(comm):
        state = md.State(rng=np.random.default_rng(comm.rank))
        state.begin(comm, {})
        for _ in range(5):
            state.commit()
            steps = comm.allgather_object(state.step)
            assert len(set(steps)) == 1
        for _ in range(5):
            state.commit()
        assert state.step == 10
        state.end()

    md.run_simulated(3, program)


@pytest.mark.parametrize("copies", [None, True])
@pytest.mark.parametrize("rows", [False, True])
def test_second_loss_before_objects_are_made_again(copies, rows):
    """Objects of `keep` that a failed step has changed, or a newcomer has not made yet."""

    def program(comm, losses):
        x, noise = np.arange(4.0), np.zeros(3)
        state = md.State(x=x, copies=copies)
        parts = [comm.split(0) for _ in range(losses + 1)]

        def made(comm):
            return (
                state.keep("moments", np.zeros(3)),
                state.keep("rng", np.random.default_rng(comm.rank)),
                state.keep("rows", np.full(3, float(comm.rank)), per_rank=True) if rows else noise,
            )

        def train(comm, until):
            moments, rng, own = made(comm)
            while state.step < until:
                total = comm.allreduce(x.sum() + rng.random() + own.sum())
                x[...] += total
                moments[...] += 2 * total
                if rows:
                    own[...] += total * (comm.rank + 1)
                state.commit()
            return moments, rng, own

        state.begin(parts[0], {})
        kept = train(parts[0], 2 if losses else 5)
        for number, part in enumerate(parts[1:]):
            if number == 0:  # within a step
                kept[1].random()
                kept[2][...] += 7 * rows
            state.leave()
            if part.rank == number:  # this thread is another rank from here on
                x = np.zeros(4)
                state = md.State(x=x, copies=copies)
            state.begin(part, {number: "was lost"})
        moments, rng, own = train(parts[-1], 5) if losses else kept
        state.end()
        return x.tobytes(), moments.tobytes(), rng.random(), own.tobytes()

    lost_twice = md.run_simulated(3, lambda comm: program(comm, 2))
    assert lost_twice == md.run_simulated(3, lambda comm: program(comm, 0))


def test_second_loss_while_fewer_have_not_dealt_out_the_parts():
    def program(comm):
        second = comm.split(None if comm.rank == 1 else 0)
        state = md.State(x=np.zeros(2))
        state.begin(comm, {})
        state.keep("rows", np.full(2, comm.rank), per_rank=True)
        state.commit()
        state.leave()
        if comm.rank == 1:
            return None
        state.begin(second, {1: "was lost"})
        state.leave()
        left = second.split(None if comm.rank == 0 else 0)
        if left is None:
            return None
        state.begin(left, {0: "was lost"})
        parts = {r: rows.tolist() for r, rows in state.parts("rows").items()}
        state.end()
        return parts

    found = md.run_simulated(3, program)
    assert found == [None, None, {0: [0, 0], 1: [1, 1], 2: [2, 2]}]


def test_loss_while_only_some_have_made_their_objects():
    """The ranks agree on what is sent, though one of them has not come to its `keep`."""

    def program(comm):
        again = comm.split(0)
        state = md.State(x=np.zeros(2))
        state.begin(comm, {})
        if comm.rank == 0:
            state.keep("moments", np.full(3, 4.0))
        state.leave()
        state.begin(again, {})
        kept = state.keep("moments", np.zeros(3))
        state.end()
        return kept.tolist()

    assert md.run_simulated(3, program) == [[4.0, 4.0, 4.0]] * 3


def test_loss_while_only_some_have_objects_that_need_copies():
    """Nobody has committed: those that have kept them begin again like the others."""

    def program(comm):
        again = comm.split(0)
        state = md.State(x=np.full(2, 3.0))
        state.begin(comm, {})
        if comm.rank != 1:
            state.keep("rows", np.full(2, comm.rank), per_rank=True)
        state.leave()
        state.begin(again, {})
        rows = state.keep("rows", np.full(2, comm.rank), per_rank=True)
        state.commit()
        state.end()
        return rows.tolist(), state.step

    assert md.run_simulated(3, program) == [([r, r], 1) for r in range(3)]


def test_commit_between_backward_passes_is_refused():
    """A loss would drop what they have added up."""

    def program(comm):
        net = a_net()
        optimizer = nn.SGD(net.parameters(), 0.1)
        state = md.State(net=net, optimizer=optimizer)
        state.begin(comm, {})
        model = md.DDP(net, comm, sync="manual")
        for _ in range(2):
            with model.no_sync():
                model.backward(model(np.ones((1, 3))))
            with pytest.raises(md.InvalidArgument, match="gradients have been added up and not"):
                state.commit()
            model.backward(model(np.ones((1, 3))))
            model.sync_gradients()
            optimizer.step()
            state.commit()
            optimizer.zero_grad()
        with model.no_sync():
            model.backward(model(np.ones((1, 3))))
        optimizer.zero_grad()  # a batch that is skipped
        state.commit()
        assert state.step == 3
        state.end()

    md.run_simulated(1, program)


def test_call_between_step_and_commit_is_told_once(caplog):
    def program(comm):
        net = a_net()
        optimizer = nn.SGD(net.parameters(), 0.1)
        state = md.State(net=net, optimizer=optimizer)
        state.begin(comm, {})
        for _ in range(3):
            optimizer.step()
            comm.allreduce(1.0)
            state.commit()
        state.end()

    md.run_simulated(2, program)
    told = [r for r in caplog.messages if "between the step of an optimizer and commit()" in r]
    assert len(told) == 1 and "State(copies=True)" in told[0]


def test_forward_of_a_part_of_a_model_is_undone():
    """Of a model whose parts have wrappers of their own, such as a generator and its critic."""
    if find_spec("torch") is None:
        pytest.skip("needs PyTorch")
    import torch

    def program(comm):
        net = torch.nn.ModuleDict({"part": torch.nn.BatchNorm1d(3)})
        state = md.State(net=net)
        for generation in range(2):
            state.begin(comm.split(0), {})
            assert net["part"].num_batches_tracked == 0, generation
            md.DDP(net["part"], state._comm)(torch.ones(4, 3))
            assert net["part"].num_batches_tracked == 1
            state.leave()
        state.end()

    md.run_simulated(1, program)


@pytest.mark.parametrize("commits", [0, 2])
def test_first_copy_is_of_the_last_commit(commits):
    """`keep` asks for it in a step whose calls and forward have changed generators and buffers."""

    def program(comm):
        rng, net = np.random.default_rng(comm.rank), Counted(3, 2)
        state = md.State(net=net, rng=rng)
        state.begin(comm, {})

        def work():
            rng.random()
            net(np.ones((1, 3)))
            comm.allreduce(np.zeros(2))

        for _ in range(commits):
            work()
            state.commit()
        before = rng.bit_generator.state["state"], net.seen[0]
        work()
        rng.random()
        state.keep("own", np.zeros(2), per_rank=True)
        reader = state._vault.reader()
        assert max(reader.steps()) == commits  # and none of the step that has begun
        head = from_bytes(reader.read(commits))
        assert (pickle.loads(head.generators)["rng"][1]["state"], head.buffers["net"][0]) == before

    md.run_simulated(2, program)

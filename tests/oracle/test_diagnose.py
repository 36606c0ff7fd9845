"""Every planted fault is named, with the right tensor, ranks and cause; on numbers."""

import numpy as np
import pytest

from mpidist.oracle.compare import rows
from mpidist.oracle.diagnose import RULES, Evidence, likely
from tests.support.oracle_runs import COUNT, SIZE, Copied, Piped, Training

FAULTS = {}
EVERY = list(range(SIZE))
AFTER = ("gradients", "parameters", "optimizer")


def fault(phase, name, ranks, *words, kind=Training):
    """Register a function that plants a fault in a training, and what is to be found."""

    def register(plant):
        FAULTS[plant.__name__] = plant, phase, name, ranks, words, kind
        return plant

    return register


def in_gradients(training, change, names=None):
    """Change the gradients of all ranks, and what follows from them."""
    for rank, data in enumerate(training.ranks):
        for name in names or list(data["gradients"]):
            x = change(rank, name, data["gradients"][name])
            data["gradients"][name] = x
            x = np.zeros_like(data["start"][name]) if x is None else x
            data["optimizer"][f"{name}.momentum_buffer"] = x
            data["parameters"][name] = data["start"][name] - np.float32(0.1) * x


@fault("start", "body.weight", [1, 2], "differ before the first step")
def unlike_start(training):
    for rank in (1, 2):
        training.ranks[rank]["start"]["body.weight"] += 1


@fault("batch", "samples", [1, 2], "ranks 1, 2 train on the same samples")
def same_samples(training):
    training.ranks[2]["samples"] = training.ranks[1]["samples"]


@fault("batch", "samples", EVERY, "every rank trains on all samples")
def undivided(training):
    for data in training.ranks:
        data["samples"] = training.whole["samples"]
        data["outputs"] = {}


@fault("batch", "samples", EVERY, "md.shard(data, comm, microbatches=12)")
def not_dealt_as_microbatches(training):
    training.facts = {"reproducible": 12, "dealt": False}
    for data in training.ranks:
        data["samples"] = data["samples"] + 1


@fault("batch", "samples", EVERY, "md.shard(data, comm, microbatches=12)")
def undivided_where_microbatches_are_needed(training):
    training.facts = {"reproducible": 12}
    undivided(training)


@fault("batch", "samples", [2], "another order", "0 of the 4")
def other_order(training):
    training.ranks[2]["samples"] = training.ranks[2]["samples"] + 1


@fault("batch", "samples", [1, 2], "fewer samples", "divides its data itself")
def divided_by_hand(training):
    training.whole["samples"] = training.whole["samples"][:COUNT]
    training.whole["outputs"] = {}


@fault("batch", "samples", [1], "rank 1 skipped the optimizer's step 1")
def skipped_step(training):
    random = np.random.default_rng(9).normal(size=(COUNT, 12)).astype(np.float32)
    mine = training.ranks[1]
    mine["samples"] = np.concatenate([mine["samples"], random])
    mine["outputs"] = {}


@fault("batch", "samples", [1], "rank 1 did not come to the end of step 1")
def absent(training):
    training.absent = (1,)


@fault("batch", "samples", [1], "the script failed on rank 1: ValueError: 3")
def failed(training):
    training.absent, training.facts = (1,), {"failed": "ValueError: 3"}


@fault("batch", "samples", [1], "rank 1 made the optimizer's step 1 without samples")
def stepped_twice(training):
    training.ranks[1]["samples"] = training.ranks[1]["samples"][:0]
    training.ranks[1]["outputs"] = {}


@fault("forward", "body", EVERY, "BatchNorm1d", "each rank's own samples")
def batch_statistics(training):
    training.traits["body"] = "BatchNorm1d", "batch statistics"
    for data in training.ranks:
        data["outputs"]["body"] = data["outputs"]["body"] * 1.01


@fault("forward", "head", EVERY, "Dropout is on")
def dropout(training):
    training.traits["head"] = "Dropout", "dropout"
    for data in training.ranks:
        data["outputs"]["head"][:, 0] = 0


@fault("forward", "head", [0], "random numbers are drawn in forward, on rank 0")
def noise(training):
    training.random_ranks = (0,)
    training.ranks[0]["outputs"]["head"] += 0.1


@fault("forward", "head", [2], "depends on the rank")
def rank_in_forward(training):
    training.ranks[2]["outputs"]["head"] += 0.1


@fault("forward", "loss", EVERY, "loss is N times", "train.py:7")
def loss_times_ranks(training):
    for data in training.ranks:
        data["loss"] = data["loss"] * SIZE


@fault("forward", "loss", EVERY, "contrastive")
def global_loss(training):
    training.whole["loss"] = training.whole["loss"] * 1.3


@fault("forward", "loss", EVERY, "the loss of rank 2 is not", "other samples", kind=Copied)
def loss_of_other_targets(training):
    training.ranks[2]["loss"] += 1


@fault("gradients", "body.weight", EVERY, "sum over samples", "train.py:7")
def summed_loss(training):
    training.whole["loss"] = sum(data["loss"] for data in training.ranks)
    in_gradients(training, lambda rank, name, x: x / np.float32(SIZE))


@fault("gradients", "body.weight", EVERY, "N times the reference's", "train.py:8")
def times_ranks(training):
    in_gradients(training, lambda rank, name, x: x * SIZE)


@fault("gradients", "body.weight", EVERY, "1/N times", "divided twice")
def over_ranks(training):
    in_gradients(training, lambda rank, name, x: x / np.float32(SIZE))


@fault("gradients", "body.weight", EVERY, "N² times")
def times_ranks_squared(training):
    in_gradients(training, lambda rank, name, x: x * SIZE**2)


@fault("gradients", "body.weight", EVERY, "no gradient is averaged")
def not_averaged(training):
    in_gradients(training, lambda rank, name, x: training.ranks[rank]["local"][name])


@fault("gradients", "head.weight", EVERY, "own gradient of head.weight", "replaced")
def replaced(training):
    local = [data["local"]["head.weight"] for data in training.ranks]
    in_gradients(training, lambda rank, name, x: local[rank], ["head.weight"])


@fault("gradients", "body.weight", EVERY, "the gradient is that of rank 1's samples")
def one_ranks(training):
    in_gradients(training, lambda rank, name, x: training.ranks[1]["local"][name])


@fault("gradients", "body.bias", EVERY, "body.bias is zero on ranks 0, 1, 2")
def zero(training):
    in_gradients(training, lambda rank, name, x: x * 0, ["body.bias"])


@fault("gradients", "body.bias", [1], "body.bias is None on rank 1")
def unused(training):
    in_gradients(training, lambda rank, name, x: None if rank == 1 else x, ["body.bias"])


@fault("gradients", "body.weight", [1], "those of step 1, too, on rank 1", "zero_grad()")
def kept_on_a_rank(training):
    training.keep()
    for name, x in training.before[0][1]["gradients"].items():
        training._set(training.ranks[1], name, training.ranks[1]["gradients"][name] + x)


@fault("gradients", "body.weight", [1], "those of step 1, too, on rank 1", "zero_grad()")
def kept_over_a_step_of_another_optimizer(training):
    kept_on_a_rank(training)
    training.last = 3


@fault("gradients", "head.weight", [1], "head.weight is another one on rank 1 only")
def changed_where_the_step_before_had_none(training):
    training.keep()
    for data in (*training.before[0], training.before[1]):
        data["gradients"]["head.weight"] = None
    g = training.ranks[1]["gradients"]["head.weight"]
    training._set(training.ranks[1], "head.weight", 3 * g)


@fault("gradients", "body.weight", EVERY, "those of step 1, too, on 2 of 3 ranks")
def kept_on_two_ranks_and_averaged(training):
    training.keep()
    for data, before in zip(training.ranks, training.before[0]):
        for name, x in before["gradients"].items():
            training._set(data, name, data["gradients"][name] + np.float32(2 / 3) * x)


def ulp(x):
    return np.nextafter(x, np.float32(np.inf))


@fault("gradients", "body.bias", EVERY, "equal but for rounding", "reproducible= promises")
def other_bits_of_a_gradient(training):
    training.exact = True
    in_gradients(training, lambda rank, name, x: ulp(x), ["body.bias"])


@fault("parameters", "head.weight", [2], "equal but for rounding", "(train.py:8)")
def other_bits_of_a_parameter(training):
    training.exact = True
    found = training.ranks[2]["parameters"]
    found["head.weight"] = ulp(found["head.weight"])


@fault("gradients", "body.weight", EVERY, "float16")
def in_float16(training):
    in_gradients(training, lambda rank, name, x: x.astype(np.float16).astype(np.float32))


@fault("gradients", "body.bias", [2], "on rank 2 only")
def changed_on_a_rank(training):
    in_gradients(training, lambda rank, name, x: x + 0.5 * (rank == 2), ["body.bias"])


@fault("gradients", "body.bias", [1], "optimizer of rank 1 has no body.bias")
def not_in_the_optimizer(training):
    del training.ranks[1]["gradients"]["body.bias"]
    del training.ranks[1]["optimizer"]["body.bias.momentum_buffer"]


@fault("optimizer", "body.bias.momentum_buffer", [2], "optimizer of rank 2 has no body.bias")
def without_state(training):
    del training.ranks[2]["optimizer"]["body.bias.momentum_buffer"]


@fault("parameters", "body.bias", [0], "optimizer of rank 0 has another state")
def other_state(training):
    state = training.ranks[0]["optimizer"]
    state["body.bias.momentum_buffer"] = state["body.bias.momentum_buffer"] + 1
    training.ranks[0]["parameters"]["body.bias"] += 1


@fault("parameters", "head.weight", [1], "on rank 1", "learning rate")
def other_learning_rate(training):
    data = training.ranks[1]
    step = data["parameters"]["head.weight"] - data["start"]["head.weight"]
    data["parameters"]["head.weight"] = data["start"]["head.weight"] + 2 * step


@fault("buffers", "running_mean", [1], "each rank's samples")
def own_buffers(training):
    training.ranks[1]["buffers"]["running_mean"] += 1


@fault("batch", "steps", [1], "rank 1 skipped the optimizer's step 1", kind=Piped)
def stage_without_steps(training):
    training.behind = (1,)


@fault("batch", "targets", [1], "targets on rank 1", "inputs on rank 0", kind=Piped)
def other_targets(training):
    training.targets = "others"


@fault("batch", "targets", [1], "divided among 2 ranks", "1 replica", kind=Piped)
def divided_among_stages(training):
    training.targets, training.shards = "others", 2


@fault("forward", "head", [1], "BatchNorm1d", "each microbatch's samples", kind=Piped)
def statistics_of_microbatches(training):
    training.traits["head"] = "BatchNorm1d", "batch statistics"
    training.ranks[1]["outputs"]["head"] *= 1.01


@fault("forward", "head", [1], "on rank 1", "rest of the microbatch", kind=Piped)
def rest_of_the_microbatch(training):
    training.ranks[1]["outputs"]["head"] += 0.1


@fault("forward", "loss", [0, 1], "the loss is M times", "M = 4", "train.py:7", kind=Piped)
def loss_times_microbatches(training):
    for data in training.ranks:
        data["loss"] = data["loss"] * 4


@fault("gradients", "body.weight", [0], "body.weight is M times", "M = 4", kind=Piped)
def gradients_times_microbatches(training):
    in_gradients(training, lambda rank, name, x: x * 4)


@fault("gradients", "body.weight", [0], "body.weight is 1/M times", kind=Piped)
def gradients_over_microbatches(training):
    in_gradients(training, lambda rank, name, x: x / np.float32(4))


@fault("gradients", "body.weight", [0], "0.3 on rank 0, 0.7 on rank 1", "clip", kind=Piped)
def clipped_by_stage(training):
    in_gradients(training, lambda rank, name, x: x * np.float32([0.3, 0.7][rank]))


@fault("gradients", "head.weight", [1], "optimizer of rank 1 has no head.weight", kind=Piped)
def optimizer_of_another_stage(training):
    training.ranks[1]["gradients"] = {"SGD.0": None}
    training.ranks[1]["optimizer"] = {}
    training.ranks[1]["parameters"]["head.weight"] = training.whole["start"]["head.weight"]


@fault("parameters", "head.weight", [1], "learning rate", kind=Piped)
def learning_rate_of_a_stage(training):
    data = training.ranks[1]
    step = data["parameters"]["head.weight"] - data["start"]["head.weight"]
    data["parameters"]["head.weight"] = data["start"]["head.weight"] + 2 * step


@pytest.mark.parametrize("planted", FAULTS)
def test_planted_fault_is_named_with_tensor_ranks_and_cause(planted):
    plant, phase, name, ranks, words, kind = FAULTS[planted]
    training = kind(seed=len(planted))
    plant(training)
    runs = training.runs()
    first = next(row for row in rows(runs) if row.differences)
    cause = likely(runs, first)
    assert (first.phase, first.differences[0].name) == (phase, name)
    assert first.differences[0].ranks == ranks
    for word in words:
        assert word in cause


def test_loss_of_added_microbatches_is_named_on_replicas(monkeypatch):
    monkeypatch.setattr(Evidence, "replicas", 2)
    training = Piped()
    for data in training.ranks:
        data["loss"] = data["loss"] * 4 * 2
    runs = training.runs()
    first = next(row for row in rows(runs) if row.differences)
    cause = "the loss is M × N times the reference's, for M = 4 microbatches and N = 2 replicas"
    assert likely(runs, first).startswith(cause)


def test_every_rule_is_the_first_to_name_a_fault():
    answers = set()
    for plant, *_, kind in FAULTS.values():
        training = kind()
        plant(training)
        runs = training.runs()
        first = next(row for row in rows(runs) if row.differences)
        answers.add(likely(runs, first))
    assert len(answers) >= len(RULES)

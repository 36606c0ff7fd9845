"""Training on simulated ranks."""

import pytest

from mpidist import run_simulated
from mpidist.parallel import DDP
from mpidist.schedule import algorithms
from tests.support import training_cases as cases
from tests.support.training_kits import KITS, skip_if_too_few

SIZES = (1, 3)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.__name__)
def test_training(case, kit, size):
    skip_if_too_few(case, size)
    run_simulated(size, lambda comm: case(comm, kit))


@pytest.mark.parametrize("size", (4,))
@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("optimizer, overlap, passes, options", cases.ONE_PROCESS)
def test_equals_one_process(kit, size, optimizer, overlap, passes, options):
    run_simulated(
        size,
        lambda comm: cases.equals_one_process(comm, kit, optimizer, overlap, passes, **options),
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("zero", (False, True))
@pytest.mark.parametrize("overlap", ("none", "polls", "thread"))
@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("optimizer", ("momentum", "adam"))
def test_a_mixture_of_experts(size, kit, optimizer, overlap, zero):
    run_simulated(size, lambda c: cases.a_mixture_of_experts(c, kit, optimizer, overlap, zero))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("overlap", ("auto", "none", "polls", "thread"))
@pytest.mark.parametrize("kit", KITS)
def test_backward_averages(size, kit, overlap):
    run_simulated(size, lambda comm: cases.backward_averages(comm, kit, overlap))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("overlap", ("auto", "none", "polls", "thread"))
@pytest.mark.parametrize("kit", KITS)
def test_backward_passes_add_up(size, kit, overlap):
    run_simulated(size, lambda comm: cases.backward_passes_add_up(comm, kit, overlap))


@pytest.mark.parametrize("overlap", ("polls", "thread"))
@pytest.mark.parametrize("kit", KITS)
def test_early_buckets(kit, overlap):
    run_simulated(3, lambda c: cases.early_buckets_are_launched_in_backward(c, kit, overlap))


@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("optimizer", ("sgd", "momentum", "adam"))
def test_uneven_inputs(kit, optimizer):
    run_simulated(3, lambda comm: cases.uneven_inputs(comm, kit, optimizer))


ALLREDUCES = [a.name for a in algorithms("allreduce") if not a.local]


@pytest.mark.parametrize("algorithm", ALLREDUCES)
def test_replicas_are_identical_with_every_algorithm(algorithm):
    """Bit by bit and at every step, though ranks add up in different places."""

    def rank_main(comm):
        kit = KITS[0].values[0]
        net = kit.mlp(comm.rank)
        model = DDP(net, comm, algorithm=algorithm, **cases.SMALL)
        make, options = kit.optimizers()["adam"]
        cases.train(comm, kit, model, make(net.parameters(), **options), steps=5)
        cases.assert_close(kit, net, cases.train_alone(kit, 0, "adam", steps=5))

    run_simulated(5, rank_main)

"""ZeRO and communication hooks under mpiexec."""

import pytest

from tests.support import zero_cases as cases
from tests.support.training_kits import KITS


@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize(
    "optimizer, overlap", [("momentum", "none"), ("adam", "polls"), ("adam", "thread")]
)
def test_zero(comm, kit, optimizer, overlap):
    cases.zero_equals_one_process(comm, kit, optimizer, overlap)


@pytest.mark.parametrize("kit", KITS)
def test_zero_clips(comm, kit):
    cases.zero_clips_by_the_norm_of_all(comm, kit)


@pytest.mark.parametrize(
    "name, overlap",
    [("float16", "thread"), ("bfloat16", "none"), ("top-k", "polls"), ("powersgd", "polls")],
)
def test_hooks(comm, name, overlap):
    cases.hooks_train_nearly_as_well(comm, KITS[0].values[0], name, overlap)


def test_steps_of_hooks_do_not_mix(comm):
    cases.steps_of_hooks_do_not_mix(comm)


@pytest.mark.parametrize("overlap", ("none", "thread"))
def test_failing_hook(comm, overlap):
    cases.a_failing_hook_is_heard_of(comm, KITS[0].values[0], overlap)


@pytest.mark.mpi(min_size=2)
def test_compression(comm):
    cases.compression_is_what_it_says(comm)

"""Groups of the backend "mpidist" in tests: deadlines, dtypes, values and their combinations."""

import threading

import pytest

from tests.support.training_kits import torch

if torch is not None:
    FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    INTS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
    COMPLEX = [torch.complex64, torch.complex128]
    DTYPES = [*FLOATS, *INTS, *COMPLEX, torch.bool]
else:
    FLOATS = INTS = COMPLEX = DTYPES = []
SECONDS = 30
name_of = str


def need(size, least):
    if size < least:
        pytest.skip(f"needs at least {least} ranks")


def values(rank, dtype, count=7):
    """Small numbers that every dtype has; True on odd ranks for bool."""
    if dtype is torch.bool:
        return torch.tensor([rank % 2 == 1, True, False, rank == 0])
    x = (torch.arange(count) + rank) % 3 + 1
    return x.to(dtype) + (1j * rank if dtype.is_complex else 0)


def combined(name, every):
    """The result of torch's own operation on one process."""
    stack = torch.stack(every)
    if stack.dtype is torch.bool:
        return stack.any(0) if name in ("SUM", "MAX", "BOR") else stack.all(0)
    wide = stack.to(torch.float64) if stack.dtype.is_floating_point else stack
    if name == "SUM":
        return wide.sum(0).to(stack.dtype)
    if name == "PRODUCT":
        return wide.prod(0).to(stack.dtype)
    if name == "AVG":
        total = wide.sum(0)
        if stack.dtype.is_floating_point or stack.dtype.is_complex:
            return (total / len(every)).to(stack.dtype)
        return total.to(stack.dtype).div(len(every), rounding_mode="trunc").to(stack.dtype)
    return stack.amax(0) if name == "MAX" else stack.amin(0)


def in_threads(*acts):
    """Run functions in a thread each; return a function that waits for them, and raises."""
    failed = []

    def run(act):
        try:
            act()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=[act]) for act in acts]
    for thread in threads:
        thread.start()

    def joined():
        for thread in threads:
            thread.join(2 * SECONDS)
            assert not thread.is_alive()
        for error in failed:
            raise error

    return joined

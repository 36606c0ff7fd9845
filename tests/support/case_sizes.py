"""How many ranks a shared case needs; with fewer its test is skipped, for it would test nothing."""

import pytest


def needs_ranks(count):
    """Mark a case, a function of a communicator, that needs so many ranks at least."""

    def mark(case):
        case.needs_ranks = count
        return case

    return mark


def skip_if_too_few(case, size):
    """Skip the test of a case that needs more ranks; every rank alike."""
    needed = getattr(case, "needs_ranks", 1)
    if size < needed:
        pytest.skip(f"needs at least {needed} ranks")

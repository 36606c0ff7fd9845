"""The library's log begins its lines with the rank, and is rank 0's unless more are asked for."""

import logging

import pytest

from mpidist.communicator.logs import set_up_log
from mpidist.errors import ConfigError

LOG = logging.getLogger("mpidist")


@pytest.fixture(autouse=True)
def restored():
    level = LOG.level
    yield
    set_up_log(0, {})
    LOG.setLevel(level)


def told(capfd, rank, **environ):
    set_up_log(rank, environ)
    LOG.info("tried ring")
    LOG.debug("too small to tell")
    return capfd.readouterr().err


def test_rank_0_by_default(capfd):
    assert told(capfd, 0, MPIDIST_LOG="info") == "rank 0: INFO: tried ring\n"
    assert "rank 1" not in told(capfd, 1, MPIDIST_LOG="info")


def test_ranks_that_are_asked_for(capfd):
    assert told(capfd, 3, MPIDIST_LOG="info", MPIDIST_LOG_RANKS="0,3").startswith("rank 3: INFO")
    assert told(capfd, 2, MPIDIST_LOG="info", MPIDIST_LOG_RANKS="all").startswith("rank 2: INFO")
    assert told(capfd, 2, MPIDIST_LOG="info", MPIDIST_LOG_RANKS="0,3") == ""


def test_nothing_is_set_up_unless_asked(capfd):
    assert told(capfd, 0) == ""


@pytest.mark.parametrize("environ", [{"MPIDIST_LOG": "loud"}, {"MPIDIST_LOG_RANKS": "first"}])
def test_what_is_not_allowed(environ):
    with pytest.raises(ConfigError, match=next(iter(environ))):
        set_up_log(0, environ)

"""The host waits for a call on a GPU, and ends the wait of its streams where that is in vain."""

import pytest

from mpidist.errors import CollectiveTimeout
from mpidist.gpu.completion import Completion


class Never:
    """An event behind a call that waits for a lost rank."""

    polls = 0

    def done(self):
        self.polls += 1
        return False


class Third(Never):
    """An event that is complete when it is asked for the third time."""

    def done(self):
        self.polls += 1
        return self.polls == 3


class Named:
    signature = "allreduce of the test"


def made(comm, survives):
    let_go = []
    completion = Completion(comm._service, lambda: let_go.append(1))
    completion._needed = survives
    return completion, let_go


def test_wait_ends_with_the_call(comm):
    completion, let_go = made(comm, True)
    event = Third()
    completion.wait(Named, event)
    assert event.polls == 3 and not let_go


def test_wait_past_the_deadline_lets_the_streams_go(comm):
    completion, let_go = made(comm, True)
    before, comm.timeout = comm.timeout, 0.1
    try:
        with pytest.raises(CollectiveTimeout, match="allreduce of the test"):
            completion.wait(Named, Never())
    finally:
        comm.timeout = before
    assert let_go == [1]


def test_where_a_loss_ends_the_job_nothing_is_waited_for(comm):
    completion, let_go = made(comm, False)
    event = Never()
    completion.wait(Named, event)
    assert not event.polls and not let_go

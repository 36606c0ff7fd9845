"""Ways of sending buckets, and chains of works."""

from types import SimpleNamespace

import pytest

from mpidist.errors import CommunicationError
from mpidist.parallel import DDP
from mpidist.parallel.transport import DONE, Chain, Polls, Thread, chained
from tests.support.training_kits import KITS, MANUAL, batch


@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("overlap", ("polls", "thread"))
def test_early_buckets_are_sent_in_backward(comm, kit, overlap):
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


class Later:
    """A Work that ends at the n-th look."""

    def __init__(self, looks):
        self.looks = looks

    def test(self):
        self.looks -= 1
        return self.looks <= 0

    def wait(self, **options):
        self.looks = 0


def test_chain_runs_steps_in_order():
    seen = []

    @chained
    def steps(first):
        seen.append(first)
        yield Later(2)
        seen.append("between")
        yield Later(1)
        seen.append("end")

    work = steps("begin")
    assert seen == ["begin"] and not work.test() and seen == ["begin"]
    assert work.test() and seen == ["begin", "between", "end"] and work.test()
    steps("again").wait()
    assert seen[3:] == ["again", "between", "end"]
    Chain(iter(())).wait()
    assert DONE.test()


class OneBucket:
    index = 0
    comm = SimpleNamespace(traced=None)


def test_transport_spans_of_works_are_taken():
    for transport in (Polls(lambda bucket: Later(1)), Thread(lambda bucket: Later(1))):
        work = transport.send(OneBucket())
        work.wait()
        transport.poll()
        assert work.test()
        ((began, ended),) = transport.spans
        assert ended >= began


def test_thread_that_died_is_an_error(monkeypatch):
    monkeypatch.setattr("mpidist.parallel.transport.ALIVE_SECONDS", 0.01)

    def leaves(bucket):
        raise SystemExit  # kills a thread quietly

    transport = Thread(leaves)
    with pytest.raises(SystemExit):
        transport.send(OneBucket()).wait()
    transport._queue.put(None)
    transport._thread.join(10)
    with pytest.raises(CommunicationError, match="thread"):
        transport.send(OneBucket()).wait()

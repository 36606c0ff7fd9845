"""Memory that device work still uses outlives its owner, however that is deleted."""

import gc

import pytest

from mpidist.device.base import InFlight, wait_before_deletion


class Event:
    """Like cupy's: the driver's event is destroyed in __del__, wherever it is still used."""

    def __init__(self, log):
        self.log, self.complete, self.destroyed = log, False, False

    def done(self):
        return self.complete

    def synchronize(self):
        self.log.append("used after its end" if self.destroyed else "waited")

    def __del__(self):
        self.destroyed = True


class Owner:
    pass


@pytest.mark.parametrize("first", ["event", "owner"])
def test_collected_with_its_events(first):
    """In a cycle objects are finalized in any order, the older ones first."""
    log, event = [], None
    if first == "event":
        event = Event(log)
    owner = Owner()
    owner.in_flight = InFlight()
    owner.in_flight.hold(event or Event(log), owner)  # the memory leads to its owner: a cycle
    del owner, event
    gc.collect()
    assert log == ["waited"]


def test_last_reference():
    log, in_flight = [], InFlight()
    past, last = Event(log), Event(log)
    in_flight.hold(past, "memory")
    past.complete = True
    in_flight.hold(last, "memory")  # which lets go what is complete
    del in_flight
    assert log == ["waited"]


def test_failed_work_is_no_error_of_the_deletion():
    class Failed(Event):
        def synchronize(self):
            super().synchronize()
            raise RuntimeError("an illegal memory access was encountered")

    log, owner = [], Owner()
    wait_before_deletion(owner, [Failed(log), Event(log)])
    del owner
    assert log == ["waited", "waited"]

"""Functions on a communicator for the layers above it, such as pipelines, benchmarks and commands.

They are no methods, because programs that train or compute do not need them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..calls.call import Call
from ..errors import InvalidArgument
from ..operations import find_op
from ..selection.calibration import Calibration
from .communicator import Communicator
from .explain import example_call


@contextmanager
def guard(comm: Communicator, what: str) -> Iterator[None]:
    """Guard messages that belong together: an exception within leaves the communicator broken.

    A step left unfinished by an exception on one rank cannot be resumed: later calls raise
    CommunicatorBroken with the reason, here and on the ranks that wait for this one.

    Parameters
    ----------
    comm : Communicator
        The communicator of the messages.
    what : str
        Name of the step, for reports, such as "pipeline step".

    Raises
    ------
    InvalidArgument
        If `what` is not a string.
    CommunicatorBroken
        At once, if the communicator is broken already, or was freed.
    """
    if not isinstance(what, str):
        raise InvalidArgument(f"rank {comm.rank}: guard: what={what!r}: expected a str")
    sequencer = comm._sequencer
    sequencer.check_usable()
    try:
        yield
    except BaseException as error:
        raise sequencer.broke(error, what, None) from error.__cause__


def max_tag(comm: Communicator) -> int:
    """Return the largest tag of messages: 2**20 - 1, or less where the MPI library's limit is.

    Parameters
    ----------
    comm : Communicator
        The communicator of the messages.
    """
    return comm._messages.width - 1


def is_symmetric(comm: Communicator, address: int) -> bool:
    """Return whether an address of this process is in memory of ``comm.empty``."""
    heap = comm._service.heap
    return heap is not None and heap.holds(address)


def calibrate(comm: Communicator) -> Calibration:
    """Measure the constants of the cost model now, within 50 ms; collective.

    Without it this happens when "auto" first needs them, unless that was turned off.

    Parameters
    ----------
    comm : Communicator
        The ranks that measure, and whose "auto" and ``explain`` use the constants.
    """
    with comm._door:
        return comm._service.calibrate()


def probes(
    comm: Communicator, public: str, sizes: Sequence[int]
) -> tuple[dict[Any, Call], dict[Any, Callable[[], None]]]:
    """Return the calls that probe a communicator's messages of so many bytes, and what runs them.

    The last one is what a short allreduce by the algorithm `public` runs.
    """
    with comm._door:
        return comm._service.probes(public, sizes)


def memory_probes(
    comm: Communicator,
) -> tuple[dict[Any, Call], dict[Any, Callable[[], None]]]:
    """Return the calls that probe the memory of a node, and functions that run them; collective.

    None where the communicator's ranks share no memory.
    """
    with comm._door:
        return comm._service.memory_probes()


def round_trip(comm: Communicator) -> float | None:
    """Return the seconds of a cache line's way from rank 0 to rank 1 and back; collective.

    On one machine it was 140 ns between hyperthreads of a core, and 650 ns between cores without a
    common cache.  A virtual machine may change between them while a program runs.

    Parameters
    ----------
    comm : Communicator
        The ranks; of those on rank 0's node the first two are measured, in about a millisecond.

    Returns
    -------
    float or None
        The best of several hundred round trips, the same on all ranks.  None if two ranks do not
        share memory there, if ranks share a core, or without compiled code.
    """
    with comm._door:
        return comm._service.round_trip()


def try_out(comm: Communicator, collective: str, nbytes: int, op: str = "sum") -> None:
    """Try out what can serve a call, as the first one of its size does; collective.

    The call has private arrays of float32, `nbytes` in all; "auto" and ``explain`` use the times.
    """
    with comm._door:
        comm._service.choose(example_call(comm._place, collective, nbytes, find_op(op)), "auto")


def before_calls(comm: Communicator, act: Callable[[], object] | None) -> None:
    """Call ``act()`` in each call of a communicator that is new, and of those split from it.

    It is called once the call is alone in the communicator, which it may not call.  None is for a
    communicator whose calls tell nothing of the step, such as those of another thread.
    """
    comm.before = act
    comm._door.before(act)


def over(comm: Communicator, ranks: Sequence[int]) -> Communicator | None:
    """Return a communicator of some ranks, with the settings and name of `comm`; collective.

    `ranks` are the members, in the order of their ranks in the new communicator; None on others.
    """
    with comm._door:
        mine = (0, ranks.index(comm.rank)) if comm.rank in ranks else (None, 0)
        backend = comm._sequencer.meet("split", lambda: comm.backend.split(*mine))
        if backend is None:
            return None
        made = comm._without_lost(backend)
    made.name = comm.name
    if made.backend.track is not None:
        made.backend.track.name(made.name)
    return made


def everyone(comm: Communicator, value: Any) -> list[Any]:
    """Return the values of all ranks, by rank, exchanged by messages alone; collective.

    Nothing is chosen, measured or called in the library: a rank that dies is noticed at once.
    """
    with comm._door:
        sequencer = comm._sequencer
        return sequencer.set_up("exchange", lambda: sequencer.everyone(value))


def known(comm: Communicator) -> tuple[Any, ...]:
    """Return what "auto" has measured in a communicator, broken or not, for :func:`take_over`."""
    estimates = comm._service.chooser.estimates
    assert estimates is not None
    return estimates.ranks_per_node, estimates.calibration, estimates.trials


def take_over(comm: Communicator, measured: tuple[Any, ...]) -> None:
    """Let "auto" choose by what another communicator of the same shape has measured.

    `measured` is a result of :func:`known`, the same on every rank; `comm` has served no call.
    """
    shape, calibration, trials = measured
    estimates = comm._service.chooser.estimates
    assert estimates is not None
    if estimates.ranks_per_node == shape:
        if calibration is not None:
            estimates.learn(calibration)
        estimates.trials.update(trials)


def learn(comm: Communicator, calibration: Calibration) -> None:
    """Set the cost model's constants, for "auto" and ``explain`` from now on; collective.

    Parameters
    ----------
    comm : Communicator
        The communicator.
    calibration : Calibration
        The same on every rank, for instance that of
        :func:`mpidist.engine.calibration.measure_links`.
    """
    with comm._door:
        comm._service.learn(calibration)

"""What a quick call does: closures over all that can be known beforehand.

Small collectives take microseconds, of which every look-up of an attribute is a percent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .binding import Program
from .kernel_bodies import arrival, body
from .service import Service
from .symmetric.kernels import Kernel

Run = Callable[[], None]
Held = Callable[[], tuple[object, ...]]


def native_run(service: Service, what: str, call: Callable[[], Any], held: Held) -> Run:
    """Make a call of the library's own collective, once all have come.

    Parameters
    ----------
    service : Service
        Of the communicator.
    what : str
        The operation, as the ranks compare and report it.
    call : callable
        The library's call, bound to its arrays.
    held : callable
        Gives what must be kept if the call does not end.
    """
    arrive = arrival(service, what)

    def run() -> None:
        if service.broken is not None:
            service.check_usable()
        service.sequence = sequence = service.sequence + 1
        try:
            arrive(sequence)
            service.inside = sequence
            call()
            service.inside = 0
        except BaseException as error:
            raise service.broke(error, what, sequence, *held()) from error.__cause__

    return run


def program_run(service: Service, what: str, how: str, program: Program, held: Held) -> Run:
    """Make a run of an algorithm over messages."""
    announce, reports = service.backend.board.announce, service.reports
    fingerprint = reports.fingerprint(what, meets=False)

    def run() -> None:
        if service.broken is not None:
            service.check_usable()
        service.sequence = sequence = service.sequence + 1
        try:
            announce(sequence, fingerprint)
            reports.check_first(sequence, what, fingerprint)
            service.run(program, what, sequence, how)
            reports.check_same(sequence, what, fingerprint)
        except BaseException as error:
            raise service.broke(error, what, sequence, *held()) from error.__cause__

    return run


def kernel_run(service: Service, what: str, how: str, kernels: Sequence[Kernel], held: Held) -> Run:
    """Make a run of a kernel; of several, one for each staging slot, in turn."""
    bodies = [(kernel, body(service, what, how, kernel)) for kernel in kernels]
    turns = len(kernels)

    def run() -> None:
        if service.broken is not None:
            service.check_usable()
        service.sequence = sequence = service.sequence + 1
        try:
            kernel, serve = bodies[sequence % turns]
            if kernel.slot is not None:
                service.take_slot(kernel, sequence, what, how)
            serve(sequence)
            service.met = sequence
        except BaseException as error:
            raise service.broke(error, what, sequence, *held()) from error.__cause__

    return run

"""An MSCCL file as an algorithm: proved in every way that the file claims, then registered."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from ...errors import InvalidArgument, MpidistError, ScheduleError
from ...measure import counted
from ...schedule.contract import COLLECTIVES
from ...schedule.machine import Proof
from ...schedule.prove import prove
from ...schedule.registry import Algorithm, algorithm, algorithms, find
from ...schedule.rounds import Schedule
from .file import File, read
from .rounds import Rounds, rounds_of

_paths: dict[tuple[str, str], str] = {}  # the file of each algorithm that was imported


class Imported(NamedTuple):
    """A registered algorithm, and its proof for the one number of ranks that its file is for."""

    algorithm: Algorithm
    proof: Proof


def import_msccl(path: str | os.PathLike, name: str | None = None) -> Imported:
    """Register the algorithm of an MSCCL file, after its proof.

    The file is for one number of ranks, and its steps become rounds of Send, Recv, Reduce and Copy.
    It is proved out of place and in place, as it claims to serve; a chunk that two steps use, of
    which one writes it, must be used by one of them first.

    Parameters
    ----------
    path : str or path
        An XML file of msccl-tools, or of RCCL.
    name : str, optional
        Name for ``algorithm=``; by default that of the file, such as ``"ring.xml"``.

    Returns
    -------
    Imported
        The algorithm, and the proof of its rounds.

    Raises
    ------
    InvalidArgument
        If it is no such file; the message has line, element and value.
    ScheduleError
        If the algorithm is wrong: the counter-example.
    Unsupported
        If a step has no counterpart, as a ``re`` of what no message brought.

    Examples
    --------
    >>> mpidist.interchange.import_msccl("ring.xml")  # doctest: +SKIP
    >>> comm.allreduce(x, algorithm="ring.xml")  # doctest: +SKIP
    """
    what, name = os.fspath(path), Path(path).name if name is None else name
    with _uncollected():
        file = read(path)
        key, place = (file.collective, name), os.path.abspath(path)
        taken = any(a.name == name for a in algorithms(file.collective, one_sided=True))
        if taken and _paths.get(key) != place:
            raise InvalidArgument(
                f"{what}: there is an {file.collective} algorithm {name!r}: expected another name"
            )
        rounds, equal, proof = proved(file)
    size, blocks = len(file.gpus), file.chunks

    def requires(size: int, expected: int = size) -> str | None:
        return None if size == expected else f"{size} ranks: expected {expected} ranks"

    schedule = _schedule(rounds)
    each = Fraction(max(proof.blocks_sent), blocks)
    apart = " Sums may differ in the last bit between ranks." * (not proof.identical)
    schedule.__doc__ = (
        f"MSCCL's {file.name} ({file.protocol}), {counted(proof.messages, 'message')}.{apart}\n\n"
        f"Rounds: {proof.rounds}.  Bytes per rank: {each} n.\n"
    )
    algorithm(*key, blocks=blocks, requires=requires, equal_blocks=equal)(schedule)
    _paths[key] = place
    return Imported(find(*key).algorithm, proof)


def proved(file: File) -> tuple[list[Rounds], bool, Proof]:
    """Prove what a file claims; return the rounds that serve calls, with their proof.

    The rounds are those with the fewest copies that are right: input and output are one buffer, and
    a sum that is only sent on takes the place of its operand.  The second value is whether all
    blocks must have one length, as chunks move through the places of others.
    """
    contract = COLLECTIVES[file.collective]
    forms = [apart for apart in (False, True) if (file.inplace, file.apart)[apart]]
    claims = {apart: rounds_of(file, apart) for apart in forms}
    for rounds in claims.values():
        _prove(file, rounds, equal=True)
    sums_sent = any(s.type == "rrs" for gpu in file.gpus for tb in gpu.blocks for s in tb.steps)
    if contract.input_buffer == "out" and (sums_sent or not file.inplace):
        try:
            lean = rounds_of(file, apart=False, exact=False)
            return lean, *_sharpest(file, lean)
        except MpidistError:
            pass  # something reads later what it overwrites
    best = claims[forms[-1] if contract.input_buffer == "in" else forms[0]]
    return best, *_sharpest(file, best)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Collect no garbage meanwhile: there is none, but 100,000 objects that stay.

    Looking at them again and again takes 40 % of an import.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _sharpest(file: File, rounds: list[Rounds]) -> tuple[bool, Proof]:
    """Return whether blocks must have one length, and the proof."""
    try:
        return False, _prove(file, rounds, equal=False)
    except ScheduleError:
        return True, _prove(file, rounds, equal=True)


def _prove(file: File, rounds: list[Rounds], equal: bool) -> Proof:
    try:
        return prove(
            file.collective,
            _schedule(rounds),
            len(file.gpus),
            blocks=file.chunks,
            equal_blocks=equal,
        )
    except ScheduleError as error:
        raise ScheduleError(f"{file.what}: {error}") from None


def _schedule(rounds: list[Rounds]) -> Callable[..., Schedule]:
    def schedule(rank: int, size: int) -> Schedule:
        return rounds[rank]

    return schedule

"""Chooses the way of a call, once for all calls that are alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..backends.base import Backend
from ..calls.call import Call
from ..errors import UnknownName
from ..schedule.registry import (
    NATIVE,
    RESERVED,
    SINGLE_COPY,
    STAGED,
    SYMMETRIC,
    Groups,
    algorithms,
    generation,
)
from ..selection.choose import Means, Way, Ways, choose
from ..selection.config import CollectiveConfig
from ..selection.estimates import Advice
from ..selection.tuning import kind_for
from ..shared_memory import Place
from .executors import SharedMemory


class Chooser:
    """What a communicator has to serve calls with, and what it chose.

    Parameters
    ----------
    backend : Backend
        Whose native collectives there are.
    config : CollectiveConfig
        What the user asks for.
    groups : tuple of tuple of int
        The ranks by node, as the configuration counts.
    shared : SharedMemory
        What the ranks of the node share.
    calibrate : callable
        Measures the cost model's constants, which a call needs; collective.

    Attributes
    ----------
    advice : Advice or None
        The tuning table and the cost model.
    """

    def __init__(
        self,
        backend: Backend,
        config: CollectiveConfig,
        groups: Groups,
        shared: SharedMemory,
        calibrate: Callable[[str], Any],
    ):
        self.backend, self.config, self.groups, self.shared = backend, config, groups, shared
        self.advice: Advice | None = None
        self._calibrate = calibrate
        self._ways: dict[Any, Way] = {}

    def forget(self) -> None:
        """Choose anew from now on: there is more, or less, to choose from."""
        self._ways.clear()

    def way(
        self, call: Call, algorithm: str, place: Place | None = None, background: bool = False
    ) -> Way:
        """Choose how to serve a call; the same on every rank, for it depends on what they share.

        A blocking call calibrates first, if its choice needs that: only there do all ranks meet.
        """
        if not isinstance(algorithm, str):
            known = [a.name for a in algorithms(call.collective)]
            raise UnknownName(f"{call.collective} algorithm", algorithm, [*known, *RESERVED])
        op = call.op
        commutes = op is None or op.commute
        key = (
            call.collective,
            algorithm,
            call.nbytes,
            call.dtype.itemsize,  # a library's limit is one of elements
            call.even,
            commutes,
            generation(),
            place is None,
            kind_for(call),
            op is None or op.builtin,
            background,
        )
        way = self._ways.get(key)
        if way is None:
            ways = Ways(call, self.means(call, place, background))
            way = choose(ways, algorithm, self.config, self.advice)
            if way.missing and not background:
                self._calibrate(call.fingerprint)  # upon which what was chosen without is forgotten
                way = choose(ways, algorithm, self.config, self.advice)
            if len(self._ways) > 4096:
                self._ways.clear()
            self._ways[key] = way
        return way

    def describe(self, call: Call, way: Way, place: Place | None, background: bool = False) -> str:
        """Return the text that ranks compare for a call: fingerprint, executor, place in memory."""
        words = [call.fingerprint]
        if way.name in (STAGED, SINGLE_COPY):
            words.append(way.name)
        if way.name == SYMMETRIC:
            words.append(f"in symmetric memory {self.shared.where(call, place)}".rstrip())
        if way.choice is not None:
            words.append(f"by {way.name}")
        if background:
            words.append("in the background")
        return " ".join(words)

    def intention(self, call: Call, algorithm: str, background: bool) -> str:
        """Say how a call is going to be served."""
        place = self.shared.place(call)
        return self.describe(call, self.way(call, algorithm, place, background), place, background)

    def means(self, call: Call, place: Place | None = None, background: bool = False) -> Means:
        """Return the executors' reasons for a call, and the facts that rules depend on."""
        native, shared = self.backend.native, self.shared
        if native is None:
            no_native: str | None = f"the {self.backend.name} backend has no collectives of its own"
        else:
            no_native = native.why_not(call)
        behind = "this is in the background" if background else None
        reasons = {
            NATIVE: no_native,
            SYMMETRIC: shared.why_not_symmetric(call, place),
            STAGED: behind or shared.why_not_staged(call),
            SINGLE_COPY: behind or shared.why_not_single_copy(call),
        }
        return Means(self.groups, reasons, self.backend.vendor, self.backend.crowded)

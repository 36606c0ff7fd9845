"""What is kept of calls that are made again: bound calls by key, up to so many bytes."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Generic, Protocol, TypeVar

NOTED = 1 << 14  # calls that are remembered without being kept, about 300 bytes each
_LOOKS = 8  # entries that are looked at to make room for one


class Entry(Protocol):
    """What can be kept.

    Attributes
    ----------
    nbytes : int
        Bytes that it holds: scratch memory, requests, and its own objects.
    used : int
        When it was used last, in operations; whoever uses it writes this.
    """

    nbytes: int
    used: int


E = TypeVar("E", bound=Entry)


class BoundCalls(Generic[E]):
    """Bound calls by key, up to a number of bytes.

    Once it is full, a call replaces another only if that was not used since the call's own last
    use: the reuse distances of both are compared, as in LIRS (Jiang and Zhang, SIGMETRICS 2002).
    A loop over more arrays than fit thus keeps as many as fit.  The least recently used alone would
    not do: each call of the loop would drop the one that is needed soonest, and be dropped before
    its next turn.

    A hit only writes `used`.  As in CLOCK, the order is brought up to date when room is needed.

    Parameters
    ----------
    limit : int
        Bytes.  The last one that is kept may go beyond, where its bytes are known only once it is
        bound: so a call that needs more than all others may be kept too.

    Attributes
    ----------
    entries : dict
        The entries by key, to look up; `keep` and `drop` change it.
    nbytes : int
        Bytes held by all.
    """

    def __init__(self, limit: int):
        self.limit, self.nbytes = limit, 0
        self.entries: OrderedDict[Hashable, E] = OrderedDict()
        self._noted: dict[int, tuple[int, tuple[weakref.ref, ...]]] = {}

    def last_use(self, key: Hashable, now: int, *things: Any) -> int | None:
        """Return when a call that is not kept was made last, or None; note that it is made now.

        Parameters
        ----------
        key : hashable
            Names the call.
        now : int
            The number of the operation.
        *things : object
            Only a call with these very objects counts: others may have their identity later.  The
            note keeps neither them nor the key alive.

        Raises
        ------
        TypeError
            If the key cannot be hashed, or a thing cannot be watched.
        """
        mark = hash(key)
        before = self._noted.get(mark)
        if before is None and len(self._noted) >= NOTED:
            self._forget_half()
        self._noted[mark] = now, tuple(map(weakref.ref, things))
        if before is None or len(before[1]) != len(things):
            return None
        return before[0] if all(r() is thing for r, thing in zip(before[1], things)) else None

    def _forget_half(self) -> None:
        """Forget the calls whose arrays are dead, and at least the older half."""
        noted = list(self._noted.items())[NOTED // 2 :]
        self._noted = {m: n for m, n in noted if all(ref() is not None for ref in n[1])}

    def make_room(self, since: int | None, nbytes: int = 0) -> bool:
        """Return whether a call that was last made at `since` may be kept; drop what must go.

        Parameters
        ----------
        since : int or None
            See `last_use`; where that is None, nothing is dropped.
        nbytes : int, optional
            Bytes of the call, if they are known before it is bound.
        """
        entries, looks = self.entries, 0
        while entries and self.nbytes + nbytes > self.limit:
            key, entry = entries.popitem(last=False)
            if since is not None and entry.used < since:
                self.nbytes -= entry.nbytes
                continue
            entries[key] = entry  # used since: the last to be looked at again
            looks += 1
            if since is None or looks == _LOOKS:
                return False
        return True

    def admits(self, key: Hashable, now: int) -> bool:
        """Return whether a call that is made now, and is bound in any case, may be kept."""
        if self.nbytes <= self.limit or key in self.entries:
            return True
        return self.make_room(self.last_use(key, now))

    def keep(self, key: Hashable, entry: E) -> None:
        """Keep an entry, in the place of one with the same key."""
        self.drop(key)
        self._noted.pop(hash(key), None)
        self.entries[key] = entry
        self.nbytes += entry.nbytes

    def drop(self, key: Hashable) -> None:
        """Drop the entry of this key, if there is one."""
        entry = self.entries.pop(key, None)
        if entry is not None:
            self.nbytes -= entry.nbytes

    def clear(self) -> None:
        """Drop every entry and forget every call."""
        self.entries.clear()
        self._noted.clear()
        self.nbytes = 0

"""What the objects of a State do between two commits, seen without a call of the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import ref

from ..frameworks.base import WeakHook, framework_of, library
from ..parallel import ddp as wrapper
from ..parallel.bucketing import Grouping
from ..parallel.ddp import DDP
from ..parallel.reducer import Phase
from .kept import MODEL, Kept, buffers_of

Sending = list[dict[str, Any] | None]
"""How each DDP sends, by the order in which they were made; None: it has made no step."""


class Observer:
    """Sees the calls, forwards, optimizers' steps and DDPs of one generation.

    `kept` are the State's objects by name, to which :meth:`watch` is told of further ones.
    `sending` is how the DDPs sent at the last commit; if the generation has `resumed` training from
    that commit, new ones send alike.  ``noted(ddp)`` is told of each DDP.

    Since the last commit: `called` is whether the step has called the communicator, `stepped`
    whether an optimizer has made a step, `forwarded` whether a model has run, which may have
    changed its buffers.
    """

    def __init__(
        self,
        kept: Mapping[str, Kept],
        sending: Sending,
        resumed: bool,
        noted: Callable[[DDP], object],
    ):
        self.called = self.stepped = self.forwarded = False
        self.sending = sending
        self._kept, self._resumed, self._committed = kept, resumed, False
        self._noted = WeakHook(noted)  # of the State, which has this observer
        self._ddps: list[ref[DDP]] = []
        # Their groupings, and how often these had been made when `_sent` was taken; -1: not final.
        self._made: list[tuple[ref[Grouping], int]] = []
        self._sent: Sending = []  # replaced, not changed: commits keep it
        self._alike: set[int] = set()  # models whose buffers are the same on all ranks
        self._removes: list[Callable[[], object]] = []
        self._untold = False  # whether there is a model whose forwards are not told
        self._save_buffers()
        made = WeakHook(self._note)  # a State that is given up does not keep DDPs alive
        wrapper.on_made.append(made)
        self._removes.append(partial(wrapper.on_made.remove, made))
        of_library = {library(k.value): k.value for k in self._models()}
        for example in of_library.values():
            self._removes.append(framework_of(example).on_step(self._note_step))
        for one in kept.values():
            self.watch(one)
        self._expect_forwards()

    def watch(self, kept: Kept) -> None:
        """Know when a forward of an object begins, if it is a model."""
        if kept.is_model:
            self._watch_model(kept.value)

    def unused_gradients(self) -> bool:
        """Return whether DDPs have added up gradients that no step of an optimizer has used."""
        if self.stepped:
            return False
        adding = (d for d in self.alive() if d.reducer.phase is Phase.BACKWARD)
        return any(d.reducer.not_averaged() for d in adding)

    def now_sending(self) -> Sending:
        """Return how each DDP that has made a step sends; anew where its buckets have changed."""
        for reference, made in self._made:
            grouping = reference()
            if grouping is not None and grouping.made != made:
                self._look()
                break
        return self._sent

    def _look(self) -> None:
        self._sent = list(self._sent)
        for i, reference in enumerate(self._ddps):
            ddp = reference()
            if ddp is None or not ddp.reducer.clock.steps:
                continue
            (grouping, before), made = self._made[i], ddp.reducer.grouping.made
            if made != before:
                self._sent[i] = ddp.sending()
                # While an order is observed, the same buckets may become final.
                self._made[i] = grouping, made if ddp.reducer.observed else -1

    def own_buffers(self) -> dict[str, list[Any]]:
        """Return the buffers of models that the ranks may not have alike, by model."""
        return buffers_of(k for k in self._models() if id(k.value) not in self._alike)

    def committed(self, sending: Sending) -> None:
        """Begin to observe the next step; `sending` is how the DDPs send at this commit."""
        self.called = self.stepped = self.forwarded = False
        self.sending, self._committed = sending, True
        self._expect_forwards()

    def alive(self) -> list[DDP]:
        """Return the DDPs that are still in use."""
        return [ddp for ddp in (reference() for reference in self._ddps) if ddp is not None]

    def leave(self) -> list[DDP]:
        """End the generation, without communication; return its DDPs."""
        ddps, self._ddps = self.alive(), []
        while self._removes:
            self._removes.pop()()
        return ddps

    # -- what happens -----------------------------------------------------------------------------

    def _note(self, ddp: DDP) -> None:
        """Let a new DDP send as the one that was made in its turn before, and know of its steps."""
        number, before = len(self._ddps), self.sending
        sending = before[number] if number < len(before) and self._resumed else None
        if sending is not None:  # the same buckets: for the same bits
            ddp.adopt(sending)
        self._ddps.append(ref(ddp))
        if all(k.value is not ddp.module for k in self._kept.values()):
            self._watch_model(ddp.module)  # a part of one: its forward is not the whole's
        self._made.append((ref(ddp.reducer.grouping), -1))
        self._sent = [*self._sent, sending]
        if ddp.buffer_sync.how != "keep":
            self._alike.add(id(ddp.module))
        elif self._resumed and not self._committed:  # it has copied those of rank 0
            for kept in self._models():
                kept.set_buffers(kept.buffers)
        self._noted(ddp)

    def _note_step(self, *_: Any) -> None:
        self.stepped = True

    def _watch_model(self, model: Any) -> None:
        remove = framework_of(model).on_forward(model, self._note_forward)
        if remove is not None:
            self._removes.append(remove)
        else:
            self._untold = True

    def _note_forward(self) -> None:
        if not self.forwarded:
            self._save_buffers()
            self.forwarded = True

    def _expect_forwards(self) -> None:
        """Save buffers now, if there is a model whose forwards are not told."""
        if self._untold:
            self._note_forward()

    def _save_buffers(self) -> None:
        for kept in self._models():
            kept.save_buffers()

    def _models(self) -> Sequence[Kept]:
        return [kept for kept in self._kept.values() if kept.kind is MODEL]

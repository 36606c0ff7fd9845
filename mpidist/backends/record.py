"""Records: messages of a fixed length that carry a few whole numbers and a text."""

from __future__ import annotations

import numpy as np


class Record:
    """Memory of one record of `nbytes`: `count` whole numbers, and a text cut to what fits.

    `data` is the record as it is sent and received; `numbers` is a view of its int64, to write to.
    """

    __slots__ = ("data", "numbers")

    def __init__(self, count: int, nbytes: int):
        self.data = np.zeros(nbytes, np.uint8)
        self.numbers = self.data[: 8 * count].view(np.int64).data

    @property
    def text(self) -> str:
        """The text; of a character that was cut within nothing is left.  May be set."""
        return self._content.tobytes().rstrip(b"\0").decode(errors="ignore")

    @text.setter
    def text(self, text: str) -> None:
        content = self._content
        encoded = text.encode()[: content.size]
        content[: len(encoded)] = np.frombuffer(encoded, np.uint8)
        content[len(encoded) :] = 0

    @property
    def _content(self) -> np.ndarray:
        return self.data[self.numbers.nbytes :]

"""Records: messages of a fixed length that carry a few whole numbers and a text."""

from __future__ import annotations

import numpy as np


class Record:
    """Memory of one record: 64-bit numbers, then a text that is cut to what fits.

    Parameters
    ----------
    count : int
        How many numbers.
    nbytes : int
        Length of the record in bytes.

    Attributes
    ----------
    data : ndarray of uint8
        The record as it is sent and received.
    numbers : writable memoryview of int64
        Its numbers.
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

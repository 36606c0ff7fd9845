"""A record: numbers and a text in a message of fixed length."""

import numpy as np
import pytest

from mpidist.backends.record import Record


@pytest.mark.parametrize(
    "text, got",
    [
        ("", ""),
        ("allreduce sum", "allreduce sum"),
        ("x" * 16, "x" * 16),  # the whole length
        ("x" * 17, "x" * 16),
        ("x" * 15 + "é", "x" * 15),  # of two bytes, one of which fits
    ],
)
def test_what_was_written_is_read(text, got):
    sent, received = Record(2, 32), Record(2, 32)
    sent.text = "of the call before, longer"
    sent.numbers[0], sent.numbers[1], sent.text = -1, 2**63 - 1, text
    assert sent.data.dtype == np.uint8 and sent.data.nbytes == 32
    received.data[:] = sent.data
    assert list(received.numbers) == [-1, 2**63 - 1] and received.text == got

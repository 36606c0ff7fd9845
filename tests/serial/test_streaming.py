"""Copies that go round the cache: every byte, whatever the width, the length and the place."""

import sys

import numpy as np
import pytest

from mpidist.errors import ConfigError
from mpidist.symmetric import parts, streaming

WIDTHS = [width for width in (16, 32, 64) if width <= streaming.store_width()]
compiled = pytest.mark.skipif(not WIDTHS, reason="needs a C compiler for x86-64")


@compiled
@pytest.mark.parametrize("width", WIDTHS)
def test_every_byte_and_no_other(width):
    random = np.random.default_rng(width)
    for count in (1, 63, 64, 65, 127, 1000, 70_001):
        source = random.integers(1, 255, count + 64, dtype=np.uint8)
        for start, first in ((0, 0), (1, 0), (0, 1), (15, 33), (63, 64)):
            target = np.zeros(count + 128, np.uint8)
            x = source[first : first + count]
            streaming.stream(target[start : start + count], x, width)()
            assert (target[start : start + count] == x).all()
            assert not target[:start].any() and not target[start + count :].any()


@compiled
def test_an_action_reads_the_array_anew_and_keeps_it_alive():
    target = np.zeros(1000)
    action = streaming.stream(target, source := np.arange(1000.0))
    source += 1
    del source
    action()
    assert (target == np.arange(1000.0) + 1).all()


def test_overlapping_and_empty_arrays_are_assigned():
    x = np.arange(100)
    streaming.stream(x[1:], x[:-1])()
    assert x.tolist() == [0, *range(99)]
    streaming.stream(x[:0], x[:0])()


@pytest.mark.parametrize(
    ("text", "least"),
    [("", 8 << 20), ("0", 0), ("64K", 64 << 10), ("none", sys.maxsize), (" None ", sys.maxsize)],
)
def test_from_where_on(text, least):
    assert streaming.least_bytes({"MPIDIST_STREAM_BYTES": text}) == least


@pytest.mark.parametrize("text", ["many", "-1", "1.3"])
def test_wrong_words_name_what_is_allowed(text):
    with pytest.raises(ConfigError, match=f"MPIDIST_STREAM_BYTES='{text}': allowed are none, and"):
        streaming.least_bytes({"MPIDIST_STREAM_BYTES": text})


@compiled
def test_only_long_results_go_round_the_cache(monkeypatch):
    monkeypatch.setenv("MPIDIST_STREAM_BYTES", "1K")
    short, long = np.empty(1023, np.uint8), np.empty(1024, np.uint8)
    assert parts.copier(short) is parts.store
    assert parts.copier(long) is streaming.stream
    assert streaming.described().endswith("bits, for results from 1K")


def test_without_a_compiler_all_is_stored(monkeypatch):
    monkeypatch.setattr(streaming, "store_width", lambda: 0)
    assert parts.copier(np.empty(64 << 20, np.uint8)) is parts.store
    assert "without a C compiler" in streaming.described()

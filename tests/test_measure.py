"""Sizes, bandwidths and spreads, as numbers and as text."""

import pytest

from mpidist.errors import InvalidArgument
from mpidist.measure import (
    algbw,
    busbw,
    counted,
    format_size,
    parse_size,
    parse_sizes,
    round_size,
    significant,
    spread,
)
from mpidist.schedule import COLLECTIVES


@pytest.mark.parametrize(
    "text", ["9007199254740992", "99999999999999999999", "8388608G", "9" * 400]
)
def test_parse_size_too_large_for_a_float_refused(text):
    with pytest.raises(InvalidArgument, match="too large a size: expected less than 900719925474"):
        parse_size(text)
    assert parse_size("9007199254740991") == (1 << 53) - 1


def test_parse_size_units_of_1024():
    assert [parse_size(t) for t in ("8", "64K", "1M", "2G", "1.5k", "3KiB", "4MB", "7B")] == [
        8,
        65536,
        1 << 20,
        2 << 30,
        1536,
        3072,
        4 << 20,
        7,
    ]
    assert parse_sizes("8,64K,8") == [8, 65536]
    assert parse_sizes("8-200") == [8, 32, 128, 200]


@pytest.mark.parametrize("text", ["", "x", "-8", "1T", "1.3", "8,,9", "64K-8", "0-8", "8-", "1e3"])
def test_parse_sizes_wrong_text_is_refused(text):
    with pytest.raises(InvalidArgument, match=r"^'[^']*' .*: "):
        parse_sizes(text)


@pytest.mark.parametrize("nbytes", [0, 1, 8, 1000, 1024, 1536, 65536, 668712, 1 << 20, 3 << 29])
def test_format_size_is_parsed_back(nbytes):
    assert parse_size(format_size(nbytes)) == nbytes
    assert len(round_size(nbytes)) <= 8


@pytest.mark.parametrize("unit", [1 << 10, 1 << 20])
@pytest.mark.parametrize("number", [1.1234, 99.99, 999.4, 1001.1, 1023.9])
def test_round_size_has_three_digits(number, unit):
    text = round_size(round(number * unit))
    assert "e" not in text and len(text) <= 6
    read = float(text[:-1]) * {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[text[-1]]
    assert read == pytest.approx(number * unit, rel=0.006)


def test_busbw_is_that_of_nccl_tests():
    assert algbw(8_000_000_000, 2.0) == 4.0
    expected = {
        "allreduce": 4.0 * 2 * 3 / 4,
        "reduce_scatter": 3.0,
        "allgather": 3.0,
        "alltoall": 3.0,
        "gather": 3.0,
        "scatter": 3.0,
        "broadcast": 4.0,
        "reduce": 4.0,
        "scan": 4.0,
        "exscan": 4.0,
        "barrier": 0.0,
    }
    assert set(expected) == set(COLLECTIVES)
    for collective, value in expected.items():
        assert busbw(collective, 8_000_000_000, 2.0, 4) == pytest.approx(value)
        assert busbw(collective, 8, 1e-6, 1) == (0.0 if value != 4.0 else algbw(8, 1e-6))


def test_significant_and_counted_text():
    values = (0.0, 1.32e-5, 0.99996, 9.9996, 312.8, 22437.4)
    told = [significant(value, 4) for value in values]
    assert told == ["0", "0.00001320", "1.000", "10.00", "312.8", "22,437"]
    assert [counted(n, "step") for n in (0, 1, 2000)] == ["0 steps", "1 step", "2,000 steps"]


def test_spread_is_half_the_quartiles_range():
    assert spread([1.0, 2.0, 3.0]) is None
    assert spread([10.0] * 9) == 0
    assert spread([8.0, 9.0, 10.0, 11.0, 12.0]) == pytest.approx(0.15)

"""The tag space: every range where it has always been, and no two ranges with a tag in common."""

import pytest

from mpidist.backends.tags import (
    ARRIVALS,
    BANKS,
    BLOCKING,
    GREETING,
    SPLIT,
    STRANDS,
    in_bank,
    of_group,
    of_strand,
    tags_of,
)

KINDS = ["array", "object", "posted", "group", "elements"]
LEAST = 32767  # what MPI promises


def ranges(limit):
    """Return (first, last, name) of all ranges, in the order of the picture."""
    tags, found = tags_of(limit), []
    for bank in range(tags.banks + 1):
        first = in_bank(BLOCKING, bank, tags.space)
        found.append((first, first + tags.space - 1, f"bank {bank}"))
    for kind in KINDS:
        found.append((tags.first[kind], tags.first[kind] + tags.width - 1, kind))
    found.append((tags.exchange, tags.exchange, "exchange"))
    found.append((tags.roll_call, tags.roll_call, "roll call"))
    found.append((tags.arrival(0), tags.arrival(ARRIVALS), "arrivals"))
    found.append((tags.last, tags.last, "last"))
    return found


@pytest.mark.parametrize(
    "limit, space, banks, width, firsts, exchange",
    [
        (LEAST, 1820, 8, 1638, [16383, 18021, 19659, 21297, 22935], 24573),
        (1 << 18, 14563, 8, 13107, [131072, 144179, 157286, 170393, 183500], 196608),
        (2**23 - 1, 65536, 62, 419430, [4194303, 4613733, 5033163, 5452593, 5872023], 6291453),
        (
            *(2**31 - 1, 65536, 64, 1 << 20),
            [536870912, 537919488, 538968064, 540016640, 541065216],
            805306368,
        ),
    ],
)
def test_layout(limit, space, banks, width, firsts, exchange):
    """A rank with another layout would send to tags at which nobody receives."""
    tags = tags_of(limit)
    assert (tags.space, tags.banks, tags.width) == (space, banks, width)
    assert [tags.first[kind] for kind in KINDS] == firsts
    assert (tags.elements(1), tags.elements(width)) == (firsts[-1], firsts[-1] + width - 1)
    assert (tags.exchange, tags.roll_call) == (exchange, exchange + 1)
    assert (tags.arrival(0), tags.arrival(ARRIVALS)) == (exchange + 2, exchange + 2050)
    assert tags.last == limit and (BLOCKING, GREETING, BANKS, SPLIT) == (0, 256, 64, 32000)


@pytest.mark.parametrize("limit", [LEAST, LEAST + 1, 1 << 18, 2**22, 2**23 - 1, 2**30, 2**31 - 1])
def test_no_tag_has_two_uses(limit):
    found = ranges(limit)
    assert found[0][0] == 0 and found[-1][:2] == (limit, limit)
    assert all(first <= last for first, last, _ in found)
    for (_, last, name), (first, _, following) in zip(found, found[1:]):
        assert last < first, f"{name} ends at {last}, {following} begins at {first}"


def test_strands():
    """The strands of an operation, two levels of them, have tags that neither share nor greet."""
    tags = [BLOCKING, GREETING]
    for k in range(STRANDS):
        outer = of_strand(BLOCKING, k)
        tags += [outer, *(of_strand(outer, inner) for inner in range(STRANDS))]
    assert len(set(tags)) == len(tags) == 2 + 255 + 255**2
    assert max(tags) == tags_of(2**31 - 1).space - 1
    assert of_strand(BLOCKING, STRANDS - 1) < GREETING < tags_of(LEAST).space


def test_groups():
    assert [of_group(tag) for tag in (0, 7, SPLIT - 1, SPLIT)] == [0, 7, SPLIT - 1, 0]
    assert SPLIT <= LEAST

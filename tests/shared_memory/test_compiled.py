"""What is compiled: every byte, whatever the width, the length and the place."""

import ctypes
import itertools
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from mpidist.errors import ConfigError
from mpidist.operations import is_half
from mpidist.shared_memory import compiled
from tests.support.operands import NUMBERS, any_numbers, total

WIDTHS = [width for width in (16, 32, 64) if width <= compiled.vector_width()]
SUMS = [(dtype, width) for dtype in NUMBERS for width in WIDTHS]
if WIDTHS:
    SUMS.remove(("float16", 16))  # F16C comes with vectors of 32 bytes
needs_compiler = pytest.mark.skipif(not WIDTHS, reason="needs a C compiler for x86-64")


@needs_compiler
@pytest.mark.parametrize("width", WIDTHS)
def test_every_byte_and_no_other(width):
    random = np.random.default_rng(width)
    for count in (1, 63, 64, 65, 127, 1000, 70_001):
        source = random.integers(1, 255, count + 64, dtype=np.uint8)
        for start, first in ((0, 0), (1, 0), (0, 1), (15, 33), (63, 64)):
            target = np.zeros(count + 128, np.uint8)
            x = source[first : first + count]
            compiled.stream(target[start : start + count], x, width)()
            assert (target[start : start + count] == x).all()
            assert not target[:start].any() and not target[start + count :].any()


def in_lines(count, start, dtype):
    """Zeros, of which `count` begin `start` elements behind the beginning of a line."""
    memory = np.zeros(count + 128, dtype)
    first = -memory.ctypes.data % 64 // memory.itemsize + start
    return memory, slice(first, first + count)


@needs_compiler
@pytest.mark.parametrize(("dtype", "width"), SUMS)
def test_sums_have_the_bits_of_numpy(dtype, width):
    dtype, random = np.dtype(dtype), np.random.default_rng(width)
    divisors = (0, 3, 4) if dtype.kind not in "iuc" else (0,)
    for count, start in itertools.product((1, 7, 16, 17, 1000, 4099), (0, 1, 5)):
        for sources, divisor in itertools.product((1, 2, 5), divisors):
            if is_half(dtype) and sources == 1 and not divisor:
                continue
            streamed = bool(count % 2) or divisor > 0
            terms = [x[3:] for x in any_numbers(dtype, count + 3, sources, random)]
            targets = [in_lines(count, start, dtype) for _ in range(3)]
            places = [memory[part] for memory, part in targets]
            compiled.one_pass(terms, places, divisor, streamed, width)()
            expected = total(terms, divisor)
            for memory, part in targets:
                assert memory[part].tobytes() == expected.tobytes()
                memory[part] = 0
                assert not memory.view(np.uint8).any()


@needs_compiler
def test_what_is_not_summed_so():
    x, (memory, part) = np.ones(100), in_lines(100, 0, "float64")
    assert compiled.one_pass([x], [memory[part]], streamed=True) is not None
    elsewhere = in_lines(100, 1, "float64")
    swapped = x.astype(x.dtype.newbyteorder())
    for sources, targets in (
        ([x[1:]], [x[:-1]]),
        ([x], [memory[part], elsewhere[0][elsewhere[1]]]),
        ([x[:0]], [memory[:0]]),
        ([swapped], [swapped.copy()]),
        ([x.astype("float16")], [np.empty(100, "float16")]),
        ([x.astype("bfloat16")], [np.empty(100, "bfloat16")]),
        ([x.astype("longdouble")] * 2, [np.empty(100, "longdouble")]),
        ([x.astype("float8_e4m3fn")] * 2, [np.empty(100, "float8_e4m3fn")]),
    ):
        assert compiled.one_pass(sources, targets, streamed=True) is None
    half = x.astype("float16")
    assert compiled.one_pass([half, half], [half], width=16) is None
    z = x.astype("complex64")
    assert compiled.one_pass([z, z], [z]) is not None
    assert compiled.one_pass([z, z], [z], divisor=2) is None


def ways(costs, pace=None):
    """The way of each copy: "o" for ordinary stores, "s" for streaming; `costs` of both ways."""
    pace, module = pace or compiled.Pace(), compiled.function("paced")
    return "".join("os"[module(ctypes.addressof(pace), *cost)] for cost in costs)


@needs_compiler
def test_fast_ordinary_stores_are_kept_but_for_trials():
    trials = {0, *(2**n for n in range(11)), 2048, 3072}
    for ordinary in (50, 100, 290):
        found = ways([(ordinary, 100)] * 4000)
        assert {n for n, way in enumerate(found) if way == "s"} == trials


@needs_compiler
def test_slow_ordinary_stores_give_way_and_are_tried_ever_more_rarely():
    pace = compiled.Pace(copies=2049, streaming=100)  # behind the trials of the beginning
    assert ways([(1000, 100)] * 4, pace) == "oooo"
    for patience in (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 8192):
        assert (pace.patience, pace.left) == (patience, patience)
        found = ways([(1000, 100)] * (patience + 4), pace)
        assert found == "s" * patience + "oooo"


@needs_compiler
def test_one_interrupted_copy_changes_nothing():
    pace = compiled.Pace(copies=2049, streaming=100)
    costs = [(1000 if n % 4 else 100, 100) for n in range(400)]  # three of four are slow
    assert ways(costs, pace) == "o" * 400


@needs_compiler
def test_stores_that_become_fast_again_are_found():
    pace = compiled.Pace(copies=2049, streaming=100)
    ways([(1000, 100)] * (4 + 32 + 4 + 64), pace)
    assert (pace.patience, pace.left) == (64, 0)
    assert ways([(100, 100)] * 300, pace) == "o" * 300
    ways([(1000, 100)] * 4, pace)
    assert pace.patience == 32


@needs_compiler
def test_new_memory_and_a_short_trial_mislead_a_few_copies_only():
    """The first copies find no pages, and the first trial is one of a few KiB in the cache."""
    pace = compiled.Pace()
    found = ways([(100, 20), *[(2000, 300)] * 8, *[(100, 300)] * 400], pace)
    assert "s" * 32 in found and found.count("s") < 60 and found.endswith("o" * 100)


@needs_compiler
def test_explain_says_by_which_stores(monkeypatch):
    pace = compiled.Pace()
    monkeypatch.setattr(compiled, "pace", lambda: pace)
    assert compiled.described_pace() == ""
    pace.ordinary, pace.streaming = 250, 100
    ratio = "(ordinary ones take 2.5 times as long as streaming ones)"
    assert compiled.described_pace() == f"; by ordinary stores {ratio}"
    pace.left = 3
    assert compiled.described_pace() == f"; by streaming stores {ratio}"


@needs_compiler
def test_deposits_copy_every_byte_by_either_way(monkeypatch):
    pace = compiled.pace()
    source, target = np.random.default_rng(1).random(10_001), np.zeros(10_003)
    action = compiled.deposit(target[1:-1], source)
    for left in (0, 1):
        pace.left, target[:] = left, 0
        action()
        assert (target[1:-1] == source).all() and not target[0] and not target[-1]
        assert pace.left == 0
    assert not hasattr(compiled.deposit(target[:8], source[:8]), "structure")
    monkeypatch.setenv("MPIDIST_STREAM_BYTES", "none")
    assert not hasattr(compiled.deposit(target[1:-1], source), "structure")


@needs_compiler
def test_action_keeps_its_array():
    target = np.zeros(1000)
    action = compiled.stream(target, source := np.arange(1000.0))
    source += 1
    del source
    action()
    assert (target == np.arange(1000.0) + 1).all()


def test_overlapping_and_empty_arrays_are_assigned():
    x = np.arange(100)
    compiled.stream(x[1:], x[:-1])()
    assert x.tolist() == [0, *range(99)]
    compiled.stream(x[:0], x[:0])()


@pytest.mark.parametrize(
    ("text", "least"),
    [("", 4 << 20), ("0", 0), ("64K", 64 << 10), ("none", sys.maxsize), (" None ", sys.maxsize)],
)
def test_from_where_on(text, least):
    assert compiled.least_bytes({"MPIDIST_STREAM_BYTES": text}) == least


@pytest.mark.parametrize("text", ["many", "-1", "1.3"])
def test_wrong_words_name_what_is_allowed(text):
    with pytest.raises(
        ConfigError, match=f"MPIDIST_STREAM_BYTES='{text}': expected a size, or none"
    ):
        compiled.least_bytes({"MPIDIST_STREAM_BYTES": text})


@needs_compiler
def test_only_long_results_go_round_the_cache(monkeypatch):
    monkeypatch.setenv("MPIDIST_STREAM_BYTES", "1K")
    short, long = np.empty(1023, np.uint8), np.empty(1024, np.uint8)
    assert not compiled.streams(short.nbytes)
    assert compiled.streams(long.nbytes)
    assert compiled.described().endswith("bits, streaming stores from 1K")


def test_without_a_compiler_all_is_stored(monkeypatch):
    monkeypatch.setattr(compiled, "WHY_NOT", "nothing, for a reason")
    for module in (compiled, compiled):
        monkeypatch.setattr(module, "vector_width", lambda: 0)
    assert not compiled.streams(64 << 20)
    assert compiled.described() == "nothing, for a reason"


@pytest.fixture
def left_over(monkeypatch, tmp_path):
    """A package of its own, in which the compiled module is looked for."""
    (tmp_path / "left_over").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(compiled, "__package__", "left_over")
    yield tmp_path / "left_over"
    for name in ("left_over", "left_over._functions"):
        sys.modules.pop(name, None)


def test_nothing_was_compiled(left_over):
    module, why_not = compiled.load()
    assert module is None and "nothing was compiled: pip install -e" in why_not


def test_what_was_compiled_cannot_be_loaded(left_over):
    (left_over / f"_functions{sysconfig.get_config_var('EXT_SUFFIX')}").write_text("no module")
    module, why_not = compiled.load()
    assert module is None and "cannot be loaded; install again" in why_not


@pytest.mark.parametrize("text", ["", "def layout(): return 1, 2, 3"], ids=["none", "another"])
def test_what_was_compiled_is_of_another_version(left_over, text):
    (left_over / "_functions.py").write_text(f"def width(): return 64\n{text}\n")
    module, why_not = compiled.load()
    assert module is None and "is of another version; install again" in why_not


def test_none_is_counted_for_all_pythons():
    """What Python 3.13 has compiled is loaded by 3.10 too, where None is counted."""
    source = (Path(compiled.__file__).parent / "module.c").read_text()
    assert "return none();" in source and "Py_RETURN_NONE" not in source
    module, _ = compiled.load()
    words = (ctypes.c_int64 * 64)()
    meeting = compiled.Meeting(ctypes.addressof(words), None, 0, 0, 0, 4, 4, 0, None)
    before = sys.getrefcount(None)
    for sequence in range(1000):
        module.announce(ctypes.addressof(meeting), sequence, 3)
    assert abs(sys.getrefcount(None) - before) < 100

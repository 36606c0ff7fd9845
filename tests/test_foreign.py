"""Forged files of every kind: each is loaded equal, or refused by its own error; none hangs.

A few hundred of each kind here, thousands in `make stress`, which prints how they ended.
"""

import hashlib
import json
import os
import random
import shutil
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpidist import Checkpoint, CollectiveConfig, run_simulated
from mpidist.bench import Refusal, Results, Row
from mpidist.bench.compare import compare, read
from mpidist.bench.compare import tables as compared_tables
from mpidist.bench.results import bound_percent, tables
from mpidist.errors import CheckpointError, ConfigError, InvalidArgument, ScheduleError, Unsupported
from mpidist.foreign import all_shown, shown
from mpidist.launcher.mpi import read_knobs
from mpidist.pipeline.schedules.show import comparison
from mpidist.pipeline.schedules.trace import read as read_trace
from mpidist.selection.tuning import TuningTable
from tests.support.forged_files import (
    forge_checkpoint,
    forged,
    opened_files,
    put_something_else,
)

LONG = os.environ.get("MPIDIST_TEST_PROFILE") == "stress"
SEED = random.randrange(1 << 32) if LONG else 27
SLOWEST = 60  # seconds of one file, on a machine with other work; a picture takes 1
EXAMPLES = Path(__file__).parents[1] / "docs" / "benchmarks_data"


def result_file():
    rows = [
        Row("allreduce", name, 2, 10.0 + n, 1.5, True, 8 << n, "float32", "sum", "mpi", spread=0.1)
        for name in ("mpi4py", "ring")
        for n in range(3)
    ]
    rows += [Row("step", "polls", 2, 1e4, figures={"share": 0.5, "same_bits": True, "best": 1.0})]
    rows += [Row("allreduce", "symmetric", 4, 7.0, bytes=64, memory="symmetric", busbw_gbs=1.0)]
    stream = {"gbs": 40.0, "array_bytes": 1 << 20, "cache_bytes": 0, "enough": False}
    header = {"ranks": 2, "nodes": {"2": 1, "4": 2}, "busy": [["here", 2, 1.7]], "stream": stream}
    header |= {"mpi": {"vendor": "Open MPI", "version": "5"}, "host": "h", "versions": {"a": "1"}}
    refused = [Refusal("allgather", "neighbor", 8, "odd")]
    return Results(header, rows, refused, notes=["a note"]).to_json().encode()


def use_results(path):
    """Everything that is made of a result file; a picture, which is slow, of one in 25."""
    found, good = read(str(path)), Results.from_json(result_file().decode())
    assert found == Results.from_json(found.to_json())
    texts = [found._repr_html_(), found.to_csv()]
    both = compare(good, found), compare(found, good)
    for made in [tables(found), *map(compared_tables, both), compared_tables(both[0], narrow=True)]:
        for table in made:
            texts += [table.heading, *table.heads, *(c for one in table.lines for c in one.cells)]
    for row in found.rows:
        bound_percent(row, found.header)
    if hashlib.sha256(found.to_json().encode()).digest()[0] < 10:
        draw_results(found, good, both[0])
    check_texts(texts)


def draw_results(found, good, both):
    from mpidist.bench.report import as_svg, bench_page, comparison_page, draw_scaling

    try:
        bench_page(found).encode()
        comparison_page(("a", good), {"b": both}, {"b": found}).encode()
        if "nodes" in found.header:
            as_svg(draw_scaling(found)).encode()
    except Unsupported as error:
        assert "nothing to draw" in str(error)


def check_texts(texts):
    for text in texts:
        assert shown(text) == text


def tuning_file():
    key = {"library": "Open MPI 5", "ranks_per_node": [2], "kind": "sum", "memory": "private"}
    entries = [
        {
            **key,
            "kind": kind,
            "collective": collective,
            "choose": [{"from": 0, "algorithm": first}, {"from": 4096, "algorithm": "native"}],
            "times_us": {"8": {first: 5.0, "native": 6.0}, "65536": {first: 90.0, "native": 50.0}},
        }
        for collective, first, kind in (
            ("allreduce", "ring", "float"),
            ("broadcast", "tree:2", "any"),
        )
    ]
    return json.dumps({"mpidist_tuning": 1, "about": {"host": "h"}, "entries": entries}).encode()


def use_tuning(path):
    table = TuningTable.load(path)
    again = TuningTable.from_json(table.to_json()).to_json()
    assert again == TuningTable.from_json(again).to_json()
    for entry in table.entries.values():
        for size in (0, 8, 100, 1 << 62):
            name = entry.at(size).choose
            entry.seconds(name, size)
    check_texts([table.why_not("x", (1,)) or ""])


def config_file():
    return CollectiveConfig(timeout=5.0, tree_arity=3, local_allreduce="ring").to_json().encode()


def use_config(path):
    found = CollectiveConfig.from_json(path.read_bytes())
    assert CollectiveConfig.from_json(found.to_json()) == found


def use_trace(path):
    trace = read_trace(path)
    try:
        picture = comparison(trace)
    except ScheduleError:
        return  # an order of actions that cannot run
    check_texts([picture.text()])


def knobs_file():
    return b"UCX_TLS=sm  # why\n\n# more\nOMPI_MCA_a=b\n"


def use_knobs(path):
    for name, value in read_knobs(str(path), "Open MPI").items():
        os.fsencode(f"{name}={value}")


@dataclass
class Kind:
    """A kind of file: the bytes of a good one, what uses a file, its error, its part of 5,000."""

    good: Any
    use: Any
    error: type
    part: float


KINDS = {
    "results": Kind(result_file, use_results, InvalidArgument, 0.4),
    "tuning": Kind(tuning_file, use_tuning, ConfigError, 0.35),
    "configuration": Kind(config_file, use_config, ConfigError, 0.25),
    "trace": Kind((EXAMPLES / "pipeline_trace.json").read_bytes, use_trace, InvalidArgument, 0.15),
    "knobs": Kind(knobs_file, use_knobs, InvalidArgument, 0.1),
}


def outside(paths, folder):
    """Return the opened paths that are not in a folder, nor part of Python or of the system."""
    allowed = (str(folder), sys.prefix, sys.base_prefix, "/proc/", "/sys/", "/usr/", "/dev/shm")
    allowed += (str(Path(__file__).parents[1]), str(Path.home() / ".cache"))
    return {path for path in paths if not path.startswith(allowed)}


def report(kind, ended, seconds, slowest):
    figures = ", ".join(f"{count} {name}" for name, count in sorted(ended.items()))
    print(f"{kind}: seed {SEED}: {figures}; {seconds:.1f} s, slowest {slowest:.2f} s")


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_forged_files_are_used_or_refused(name, tmp_path, capsys):
    kind, draw = KINDS[name], random.Random(f"{name} {SEED}")
    folder, secret = tmp_path / "of somebody", tmp_path / "secret"
    folder.mkdir()
    secret.write_text("x" * 100)
    file, good = folder / "file", kind.good()
    file.write_bytes(good)
    kind.use(file)
    ended, slowest, begun = Counter(), 0.0, time.monotonic()
    with opened_files() as opened:
        for number in range(int(5000 * kind.part) if LONG else 150):
            text = forged(good, draw)
            file.write_bytes(text)
            if draw.random() < 0.03 and name != "configuration":  # that one is a text
                put_something_else(file, draw, secret)
            since = time.monotonic()
            try:
                if file.exists():
                    kind.use(file)
                    ended["used"] += 1
            except kind.error as error:
                ended["refused"] += 1
                assert shown(str(error)) == str(error) and len(str(error)) < 4000, text[:500]
            except Exception as error:
                raise AssertionError(f"{name} {number}: {text[:3000]!r}") from error
            spent = time.monotonic() - since
            slowest = max(slowest, spent)
            if spent > SLOWEST:
                print(f"{spent:.1f} s: {text[:3000]!r}")
            if file.is_dir() and not file.is_symlink():
                file.rmdir()
            file.unlink(missing_ok=True)
    with capsys.disabled():
        report(name, ended, time.monotonic() - begun, slowest)
    assert slowest < SLOWEST
    assert min(ended["used"], ended["refused"]) > 10
    assert outside(opened, folder) <= {str(secret), "/dev/zero"}  # the links that are followed


# -- checkpoints ---------------------------------------------------------------------------------


def saved(folder):
    state = {"w": np.arange(20_000, dtype="f4"), "n": [1, (2.5, "x")], "s": np.float32(3)}
    state["i"] = np.arange(7)
    return run_simulated(2, lambda comm: Checkpoint(folder, comm).save(7, state=state, n=3))[0]


def arrays_in(value):
    if isinstance(value, (np.ndarray, np.generic)):
        yield value
    inner = value.values() if isinstance(value, dict) else value
    for one in inner if isinstance(inner, (list, tuple, type({}.values()))) else ():
        yield from arrays_in(one)


def loaded(folder):
    """Load on two ranks: "refused", or the bytes of all arrays, the same on both."""

    def load(comm):
        comm.timeout = SLOWEST
        try:
            return {np.asarray(a).tobytes() for a in arrays_in(Checkpoint(folder, comm).load())}
        except CheckpointError as error:
            assert shown(str(error)) == str(error)
            return "refused"

    first, second = run_simulated(2, load)
    assert first == second
    return first


def test_forged_checkpoints_are_loaded_or_refused(tmp_path, capsys):
    draw, secret = random.Random(f"checkpoint {SEED}"), tmp_path / "secret"
    secret.write_bytes(np.arange(20_000, dtype="f4").tobytes() * 2)
    name = saved(tmp_path / "good").name
    good = loaded(tmp_path / "good")
    folder = tmp_path / "forged"
    ended, slowest, begun = Counter(), 0.0, time.monotonic()
    for number in range(5000 if LONG else 150):
        shutil.copytree(tmp_path / "good", folder)
        forge_checkpoint(folder / name, draw, secret)
        manifest = folder / name / "manifest.json"
        text = manifest.read_bytes()[:3000] if manifest.is_file() else ""
        since = time.monotonic()
        try:
            with opened_files() as opened:
                found = loaded(folder)
        except Exception as error:
            raise AssertionError(f"checkpoint {number}: {text!r}") from error
        slowest = max(slowest, time.monotonic() - since)
        ended["refused" if found == "refused" else "loaded"] += 1
        assert found == "refused" or found <= good | {b""}, text
        assert not outside(opened, folder), text
        shutil.rmtree(folder)
    with capsys.disabled():
        report("checkpoint", ended, time.monotonic() - begun, slowest)
    assert slowest < SLOWEST
    assert min(ended["loaded"], ended["refused"]) > 10


def test_texts_of_others_are_shown_with_escapes():
    assert all_shown({"\x1b": ["\ud800", 1, {"a": "\u202e"}]}) == {
        "\\x1b": ["\\ud800", 1, {"a": "\\u202e"}]
    }

"""The tuning table: reading, looking up, and when it is used."""

import json
import logging
import os

import ml_dtypes
import numpy as np
import pytest

from mpidist import ConfigError, Op, run_simulated
from mpidist.calls.call import Call
from mpidist.engine.calibration import from_environment
from mpidist.selection.rules import Rule
from mpidist.selection.tuning import Key, TuningEntry, TuningTable, kind_for, rules_of
from tests.support.choices import KEY, call_for, chosen, table

# -- the document ----------------------------------------------------------------------------------


def test_round_trip(tmp_path):
    first, path = table(), tmp_path / "t.json"
    first.save(path)
    second = TuningTable.load(path)
    assert second.source == str(path)
    (one,), (other,) = first.entries.values(), second.entries.values()
    assert one.key == other.key and one.rules == other.rules
    for size, at in one.times.items():
        assert other.times[size] == pytest.approx(at)
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"], "nothing is left beside it"


def document(**changes):
    content = json.loads(table().to_json())
    content["entries"][0].update(changes)
    return content


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "t.json is not JSON"),
        ("[" * 100_000, "t.json is nested too deep"),
        ([], "t.json is not a tuning table"),
        ({"rows": []}, "t.json is not a tuning table"),
        ({"mpidist_tuning": 7, "entries": []}, "t.json: version 7 of the table: .* 1"),
        ({"mpidist_tuning": 1, "entries": 3}, "'entries' is 3: .* list"),
        ({"mpidist_tuning": 1, "entries": [3]}, "entry 0 is 3: .* object"),
        (document(choose=[{"from": 0, "algorithm": "rign"}]), "entry 0: .*did you mean 'ring'"),
        (document(choose=[{"from": 0, "algorithm": "ring:4"}]), "entry 0: .*ring has no arity"),
        (document(choose=[{"from": 0, "algorithm": "autoo"}]), "entry 0: .*auto"),
        (
            document(choose=[{"from": 8, "algorithm": "ring"}]),
            r"'choose' .*\[8\]: expected 0",
        ),
        (
            document(choose=[{"algorithm": "ring"}]),
            "entry 0: .*'choose' .* list of {from, algorithm}",
        ),
        (document(choose=[]), r"entry 0: 'choose' .*\[\]: expected 0"),
        (document(times_us={"8": {"ring": 0}}), "entry 0: 'times_us': .*> 0"),
        (document(times_us={"x": {}}), "'times_us'"),
        (document(collective="allredcue"), "collective='allredcue': .*allreduce"),
        (document(kind="float32"), "kind='float32': .*any, float"),
        (document(memory="shared"), "memory='shared': .*private, symmetric"),
        (document(ranks_per_node=[0]), r"ranks_per_node=\[0\]: .*> 0"),
        (document(ranks_per_node=4), "ranks_per_node=4"),
        (document(library=None), "library=None: .*name"),
    ],
)
def test_bad_documents_say_where_and_why(content, told):
    text = content if isinstance(content, str) else json.dumps(content)
    with pytest.raises(ConfigError, match=told):
        TuningTable.from_json(text, "t.json")


def test_bad_files(tmp_path):
    with pytest.raises(ConfigError, match="no.json: No such file"):
        TuningTable.load(tmp_path / "no.json")
    with pytest.raises(ConfigError, match="Is a directory"):
        TuningTable.load(tmp_path)
    (tmp_path / "b").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="it is not text"):
        TuningTable.load(tmp_path / "b")


def test_merged():
    other = Key("simulated", (2,), "float", "allreduce", "private")
    old = TuningTable([*table().entries.values(), TuningEntry(other, rules_of([(0, "ring")]), {})])
    new = old.merged(table({64: "linear"}))
    assert new.find(other).at(1).choose == "ring"
    assert new.find(KEY).at(1 << 20).choose == "linear"


# -- looking up ------------------------------------------------------------------------------------


def test_the_way_changes_where_the_times_cross():
    entry = table().find(KEY)
    # tree leads by 4 at 64 bytes, ring by 4 at 1024: they are even in the middle, 256 bytes.
    assert entry.rules == (Rule("tree:4", 0, 256), Rule("ring", 256))
    assert entry.at(0) == entry.rules[0]
    assert entry.at(255).choose == "tree:4" and entry.at(256) == entry.rules[1]
    assert entry.at(1 << 40).choose == "ring", "above the largest size"


def test_switch_point_without_times():
    entry = table({64: "linear", 1024: "ring"}).find(KEY)
    assert entry.rules == (Rule("linear", 0, 256), Rule("ring", 256))


def test_a_measured_size_keeps_its_own_way():
    times = {8: {"ring": 1.0, "linear": 1.0}, 32: {"ring": 2.0, "linear": 1.0}}
    entry = table({8: "ring", 32: "linear"}, times).find(KEY)
    assert entry.at(8).choose == "ring" and entry.at(9).choose == "linear"
    times = {8: {"ring": 1.0, "linear": 2.0}, 32: {"ring": 1.0, "linear": 1.0}}
    entry = table({8: "ring", 32: "linear"}, times).find(KEY)
    assert entry.at(31).choose == "ring" and entry.at(32).choose == "linear"


def test_times_are_interpolated_on_logarithmic_axes():
    entry = table().find(KEY)
    assert entry.seconds("tree:4", 256) == pytest.approx(8e-6)
    assert entry.seconds("tree:4", 64) == 2e-6
    for nbytes in (0, 63, 4096):
        assert entry.seconds("tree:4", nbytes) is None, "no guess beyond the measured sizes"
    assert entry.seconds("linear", 128) is None, "linear was not measured there"
    assert entry.seconds("binomial", 128) is None


def test_kinds():
    kinds = {"float32": "float", "float64": "float", "float16": "half", "int8": "int"}
    for dtype, kind in {**kinds, "complex64": "complex"}.items():
        assert kind_for(call_for(1, dtype=dtype)) == kind
    assert kind_for(call_for(1, "max", "bool")) == "bool"
    assert kind_for(call_for(1, dtype=ml_dtypes.bfloat16)) == "half"
    broadcast = Call("broadcast", 0, 4, 0, np.dtype("int8"), np.zeros(1), np.zeros(1))
    assert kind_for(broadcast) == "any"


# -- when a table is used --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "groups", "told"),
    [
        (call_for(16), ((0, 1), (2, 3)), r"it is for simulated, 4 ranks on 1 node; this is sim"),
        (call_for(16, dtype="int32"), None, "no entry for allreduce of kind int in private memory"),
        (call_for(16, Op(np.add)), None, "operations of the user"),
    ],
)
def test_table_of_another_setting(call, groups, told):
    candidate = chosen(table(), call, groups=groups or ((0, 1, 2, 3),))
    assert candidate.name == "recursive_doubling"
    assert told in candidate.why


def test_unused_table_is_logged_once(caplog):
    elsewhere = table(key=Key("another MPI 1.0", (4,), "float", "allreduce", "private"))
    with caplog.at_level(logging.WARNING, "mpidist"):
        run_simulated(4, lambda comm: comm.split(0).explain("allreduce", 8), tuning=elsewhere)
        run_simulated(4, lambda comm: comm.split(comm.rank % 2).rank, tuning=table())
    (record,) = caplog.records
    assert "t.json does not apply: it is for another MPI 1.0, 4 ranks" in record.message


def test_table_after_split():
    pair = Key("simulated", (2,), "float", "allreduce", "private")
    both = table().merged(table({64: "linear"}, key=pair))

    def names(comm):
        half = comm.split(comm.rank % 2)
        total = half.allreduce(np.ones(3, "float32"))
        return comm.explain("allreduce", 8)[0].name, half.explain("allreduce", 8)[0].name, total[0]

    assert run_simulated(4, names, tuning=both) == [("tree:4", "linear", 2.0)] * 4


def test_explain_shows_the_times_of_the_table():
    chosen, every = run_simulated(4, lambda c: c.explain("allreduce", 64), tuning=table())[0]
    times = {candidate.name: candidate.seconds for candidate in every}
    assert chosen.seconds == pytest.approx(2e-6) and "tuning table" in chosen.basis
    assert times["ring"] == pytest.approx(8e-6) and times["binomial"] is None
    chosen, _ = run_simulated(4, lambda c: c.explain("allreduce", 64))[0]
    assert chosen.seconds is None


def test_the_variable():
    assert from_environment({}) is None
    assert from_environment({"MPIDIST_CALIBRATE": "0"}) is False
    assert from_environment({"MPIDIST_CALIBRATE": "1"}) is True
    with pytest.raises(ConfigError, match="MPIDIST_CALIBRATE='no': expected 0 or 1"):
        from_environment({"MPIDIST_CALIBRATE": "no"})


@pytest.mark.parametrize("path", ["/dev/zero", "fifo"])
def test_only_regular_files_are_tables(path, tmp_path):
    """A device without an end, or a pipe without a writer, would be waited for."""
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="not a regular file"):
        TuningTable.load(tmp_path / path)


def test_numbers_beyond_floats_are_refused(tmp_path):
    table = json.dumps(
        {
            "mpidist_tuning": 1,
            "entries": [
                {
                    "library": "Open MPI 5.0.11",
                    "ranks_per_node": [2],
                    "kind": "float",
                    "collective": "allreduce",
                    "memory": "private",
                    "choose": [{"from": 0, "algorithm": "ring"}],
                    "times_us": {"8": {"ring": 5.0}},
                }
            ],
        }
    )
    assert TuningTable.from_json(table, "t.json").entries
    for old, new in (('"from": 0', '"from": Infinity'), ("5.0", "1" + "0" * 400), ("5.0", "NaN")):
        with pytest.raises(ConfigError, match=r"t\.json: entry 0"):
            TuningTable.from_json(table.replace(old, new), "t.json")


def test_a_table_is_not_saved_through_a_name_that_others_can_foresee(tmp_path):
    (tmp_path / "precious").write_text("kept")
    os.symlink("precious", tmp_path / f"t.json.{os.getpid()}.new")
    TuningTable().save(tmp_path / "t.json")
    assert (tmp_path / "precious").read_text() == "kept"
    assert TuningTable.load(tmp_path / "t.json").entries == {}

"""What an earlier run has proved: said, not proved again, and never trusted for other sources."""

import json
import os

import pytest
from click.testing import CliRunner

from mpidist.cli import main
from mpidist.commands import proved
from mpidist.schedule import algorithm, sweep
from mpidist.schedule.registry import unregister

PROVE = ("prove", "broadcast", "--ranks", "1-5", "--jobs", "1")
NEVER = proved.NEVER
BEFORE = "an earlier run had"


@pytest.fixture
def remembered(tmp_path, monkeypatch):
    """The file in an empty cache, which is used although a test runs."""
    monkeypatch.setattr(proved, "NEVER", ())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "mpidist" / "proofs.json"


def call(*args, status=0):
    result = CliRunner().invoke(main, args)
    assert result.exit_code == status, result.output
    return result


def test_a_second_run_says_what_was_proved_before_and_proves_the_rest(remembered, monkeypatch):
    first = call(*PROVE)
    assert BEFORE not in first.output and remembered.exists()
    monkeypatch.setattr(sweep, "_prove_all", lambda task: pytest.fail(f"proves {task}"))
    second = call(*PROVE)
    assert (
        second.output.splitlines()[-1].partition(" in ")[0]
        == (first.output.splitlines()[-1].partition(" in ")[0])
    )
    number = json.loads(call(*PROVE, "--json").output)["proofs"]
    assert f"{BEFORE} {number} of these proofs" in second.output


def test_more_ranks_are_proved_beside_those_of_before(remembered):
    before = json.loads(call(*PROVE, "--json").output)
    more = json.loads(call("prove", "broadcast", "--ranks", "1-6", "--jobs", "1", "--json").output)
    assert all(row["before"] == 0 for row in before["rows"])
    assert [row["before"] for row in more["rows"]] == [row["proofs"] for row in before["rows"]]
    assert more["proofs"] > before["proofs"]
    assert more["messages"] > before["messages"]


def test_runs_beside_each_other_keep_what_both_have_proved(tmp_path):
    path = tmp_path / "proofs.json"
    for task, numbers in (("one", [1, 2]), ("other", [3, 4])):
        proved.keep(path, "key", {task: numbers})
    assert json.loads(path.read_text()) == {"key": {"one": [1, 2], "other": [3, 4]}}
    proved.keep(path, "later", {"one": [1, 2]})
    assert json.loads(path.read_text()) == {"later": {"one": [1, 2]}}


def test_again_proves_all(remembered):
    call(*PROVE)
    assert BEFORE not in call(*PROVE, "--again").output


def test_other_sources_make_all_new(remembered, monkeypatch):
    call(*PROVE)
    monkeypatch.setattr(proved, "_key", lambda: "of other sources")
    assert BEFORE not in call(*PROVE).output
    assert BEFORE in call(*PROVE).output
    assert list(json.loads(remembered.read_text())) == ["of other sources"]


def test_the_key_changes_with_any_source(tmp_path, monkeypatch):
    package = tmp_path / "mpidist"
    for room in proved._ROOMS:
        (package / room).mkdir(parents=True, exist_ok=True)
        (package / room / "one.py").write_text("a = 1\n")
    monkeypatch.setattr(proved, "__file__", str(package / "commands" / "proved.py"))
    keys = {proved._key()}
    for room in proved._ROOMS:
        (package / room / "one.py").write_text("a = 2\n")
        keys.add(proved._key())
        (package / room / "two.py").write_text("")
        keys.add(proved._key())
    assert len(keys) == 1 + 2 * len(proved._ROOMS)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"torn": {"broad', "is not JSON"),
        ('["foreign"]', "expected"),
        ('{"KEY": {"broadcast": [1, 2, 3]}}', "two numbers"),
        ('{"KEY": {"broadcast": [1, -2]}}', "two numbers"),
        ('{"KEY": {"broadcast": ["1", 2]}}', "expected"),
    ],
)
def test_a_file_of_another_form_is_ignored_with_a_line(remembered, content, reason):
    remembered.parent.mkdir()
    remembered.write_text(content.replace("KEY", proved._key()))
    result = call(*PROVE)
    assert result.stderr.startswith("ignored the earlier proofs in ") and reason in result.stderr
    assert BEFORE not in result.output
    assert BEFORE in call(*PROVE).output  # it was replaced


def test_a_file_of_another_user_is_ignored(remembered, monkeypatch):
    call(*PROVE)
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    result = call(*PROVE)
    assert "of another user" in result.stderr and BEFORE not in result.output


def test_a_folder_that_cannot_be_written_is_no_error(remembered):
    remembered.parent.write_text("a file in the place of the folder")
    call(*PROVE)
    assert remembered.parent.is_file()


@pytest.mark.parametrize("name", NEVER)
def test_tests_and_ci_prove_each_time(remembered, monkeypatch, name):
    monkeypatch.setattr(proved, "NEVER", (name,))
    monkeypatch.setenv(name, "true")
    call(*PROVE)
    assert not remembered.exists()


def test_beside_an_own_algorithm_nothing_is_remembered(remembered):
    @algorithm("broadcast", "own")
    def own(rank, size, *, root):
        yield ()

    try:
        call(*PROVE, status=1)  # it is wrong from 2 ranks on
        assert not remembered.exists()
    finally:
        unregister("broadcast", "own")
    call(*PROVE)
    assert remembered.exists()


def test_a_counterexample_is_never_remembered():
    @algorithm("broadcast", "own")
    def own(rank, size, *, root):
        yield ()

    known = {}
    try:
        for _ in range(2):
            (row,) = sweep.sweep(range(1, 4), ["broadcast"], ["own"], known=known)
            assert row.counterexample.startswith("2 ranks") and row.sizes == (1, 2, 3)
            assert row.before == len(known) - 1 or list(known) == ["broadcast own 1 0 by 2"]
    finally:
        unregister("broadcast", "own")

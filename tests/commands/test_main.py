"""The command line without MPI: lists, proofs, the command that run would start, and bad input."""

import json
import os
import re
import shlex
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from mpidist.backends.flight import fingerprint_of
from mpidist.backends.recorder import Recorder
from mpidist.cli import COMMANDS, main
from mpidist.commands.export import export_command
from mpidist.commands.export.library import check_no_file
from mpidist.commands.flight import flight_command
from mpidist.commands.prove import spans
from mpidist.commands.slurm import scripts
from mpidist.communicator import launch
from mpidist.errors import InvalidArgument, LaunchError
from mpidist.interchange import mpich, openmpi
from mpidist.launcher.job import check_not_nested
from mpidist.launcher.mpi import environment_for, launched_rank
from mpidist.pipeline.schedules import schedules
from mpidist.schedule import COLLECTIVES, algorithms
from mpidist.schedule.registry import describe, unregister
from tests.support import mscclpp
from tests.support.msccl import GOLDEN
from tests.support.processes import environment

BENCHMARKS = (
    "collectives",
    "compare",
    "ddp",
    "gpu",
    "overhead",
    "pipeline",
    "predict",
    "scaling",
    "torch",
)

MINE = '''
from mpidist.schedule import algorithm
from mpidist.algorithms.ring import allreduce_ring

@algorithm("allreduce", "mine", blocks=lambda size: size)
def mine(rank, size):
    """Go round as I like it.

    Rounds: 2(p-1).  Bytes per rank: 2(p-1)/p n.
    """
    yield from allreduce_ring(rank, size)
'''


@pytest.fixture(autouse=True)
def no_launch(monkeypatch):
    """Act as a user would who is in no MPI job."""
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def a_process_of_its_own(monkeypatch):
    """Each command would start mpidist with settings of its own; here all share a process.

    And with the tests of other files, whose communicator stays as it is.
    """
    monkeypatch.setattr(launch, "_default", None)
    yield
    if launch._default is not None and launch._default.broken is None:
        launch._default.free()


def call(*arguments, status=0):
    result = CliRunner().invoke(main, list(arguments), prog_name="mpidist")
    if not isinstance(result.exception, (SystemExit, type(None))):
        raise result.exception
    assert result.exit_code == status, result.output
    return result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(command):
    text = call(command, "--help")
    assert "Usage: mpidist " + command in text
    assert command == "info" or "mpidist" in text.partition("Examples:")[2]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_help_with_examples(name):
    text = call("bench", name, "--help")
    assert f"Usage: mpidist bench {name} " in text
    assert "mpidist bench" in text.partition("Examples:")[2]


def test_every_export_has_help_with_examples():
    assert "Commands:" in call("export", "--help")
    for name in export_command.commands:
        assert "mpidist export " in call("export", name, "--help").partition("Examples:")[2]


def test_export_goal_prints_or_writes_the_text(tmp_path):
    path = str(tmp_path / "ring.goal")
    words = ("export", "goal", "allreduce", "ring", "--ranks", "3", "--bytes", "99")
    printed = call(*words)
    assert call(*words, "-o", path) == f"allreduce ring on 3 ranks: {path}\n"
    assert (tmp_path / "ring.goal").read_text() == printed
    refused = call(*words[:3], "in_place", *words[4:], status=1)
    assert "allreduce in_place needs shared memory" in refused
    assert "\nnum_ranks 3\n" in printed and "rank 2 {\n" in printed


def test_export_msccl_writes_a_file_that_is_proved(tmp_path):
    path = str(tmp_path / "out.xml")
    words = ("export", "msccl", "allgather", "bruck", "--ranks", "5", "--protocol", "LL")
    assert call(*words, "-o", path) == f"allgather bruck on 5 ranks: {path}\n"
    assert 'proto="LL"' in (tmp_path / "out.xml").read_text()
    assert "1 proof of " in call("prove", path)
    unregister("allgather", "out.xml")
    assert "MSCCL's files are of" in call(*words[:2], "barrier", "linear", *words[4:], status=1)


def test_export_of_predicted_rules_writes_them(tmp_path):
    words = ("allreduce", "--ranks", "4,8", "--bytes", "64,1M", "--predict", "1e-6,1e-9")
    version = ("--version", "5")
    printed = call("export", "openmpi", *words, *version, "-o", str(tmp_path / "rules"))
    assert "2 rules written" in printed and f"={tmp_path / 'rules'}" in printed
    written = (tmp_path / "rules").read_text()
    assert "beta 1e-09 s" in written and "\n64 3 0 0  # allreduce on 8 ranks" in written
    call("export", "openmpi", *words, "--version", "6", "-o", str(tmp_path / "rules.json"))
    assert json.loads((tmp_path / "rules.json").read_text())["rule_file_version"] == 3
    assert "written" in call("export", "nccl", *words, "-o", str(tmp_path / "tuner.csv"))
    assert "\nallreduce,64," in (tmp_path / "tuner.csv").read_text()
    words = ("allreduce", "--ranks", "4", "--bytes", "1M", "--predict", "0,1e-9", *version)
    assert "is not written" in call("export", "openmpi", *words, "-o", str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


def test_export_beside_a_file_in_force_is_refused(monkeypatch):
    for name in (*openmpi.environment(""), *mpich.environment("")):
        with monkeypatch.context() as change:
            change.setenv(name, "old")
            with pytest.raises(InvalidArgument, match=f"{name}=old is set, so X would not"):
                check_no_file("X", ["OTHER_NAME", name])
    check_no_file("X", ["OTHER_NAME"])


def test_bench_allreduce_is_bench_collectives():
    long = call("bench", "collectives", "allreduce", "--bytes", "x", status=2)
    for words in (["allreduce", "--bytes", "x"], ["--bytes", "x", "allreduce"]):
        assert call("bench", *words, status=2) == long


def test_help_names_every_command():
    text = call("--help")
    assert all(f"\n  {command}" in text for command in COMMANDS)
    benchmarks = call("bench", "--help").partition("Commands:")[2].partition("Examples:")[0]
    assert tuple(line.split()[0] for line in benchmarks.splitlines() if line.strip()) == BENCHMARKS
    assert "mpidist 0" in call("--version")


def test_flight(tmp_path, monkeypatch):
    monkeypatch.setenv("MPIDIST_FLIGHT", str(tmp_path / "flights"))
    assert "no flight records in" in call("flight", status=2)
    recorder = Recorder(tmp_path / "flights" / "a-job", 1, 2)
    track = recorder.track([0, 1], 1)
    for number in (1, 2, 3):
        text = f"broadcast root=0 {number} x int8"
        recorder.describe(fingerprint_of(text, False), text)
        track.begin(number, fingerprint_of(text, False))
    for words in ([], ["a-job"], [str(recorder.job)]):
        first, *lines = call("flight", *words).splitlines()
        assert first.startswith("job a-job: ")
        assert lines[0].startswith("rank 1: running; in world #3 broadcast root=0 3 x int8 (3 B), ")
        assert lines[1].startswith("rank 0: no record here: ")
    *_, head, second, third = call("flight", "--last", "2").splitlines()
    assert head == "rank 1, 3 operations begun:"
    assert "world     #2 broadcast" in second and "world     #3 broadcast" in third
    assert call("flight", "--list").startswith("a-job  1 of 2 ranks, 1 running  ")
    ended = recorder.job.parent / "ended"
    monkeypatch.setattr("mpidist.launcher.flight.jobs", lambda: [ended, recorder.job])
    assert call("flight", "--list").startswith("a-job  ")  # the other has just gone
    assert "--list: not with a job" in call("flight", "a-job", "--list", status=2)
    assert "'b-job': expected a folder" in call("flight", "b-job", status=2)
    parameter = next(each for each in flight_command.params if each.name == "job")
    context = click.Context(flight_command)
    assert [item.value for item in parameter.shell_complete(context, "a-")] == ["a-job"]
    assert [item.type for item in parameter.shell_complete(context, "b-")] == ["file"]


def test_list():
    text = call("list").splitlines()
    assert max(map(len, text)) <= 160  # a file, too, is read by people
    lines = [line.split()[:2] for line in text if line[:1].strip()]
    for known in algorithms(one_sided=True):
        name = known.name + (":K" if "arity" in known.uses else "")
        assert [known.collective, name] in lines
    places = [list(COLLECTIVES).index(first) for first, *_ in lines if first in COLLECTIVES]
    assert places == sorted(places)


def test_explain_elsewhere_has_a_row_for_each_algorithm():
    job = ["--ranks", "64", "--nodes", "8", "--predict", "2e-6,1e-9"]
    text = call("explain", "allreduce", "64K", *job)
    assert "allreduce, 64K bytes, 64 ranks on 8 nodes that are not here" in text
    assert all(re.search(rf"^(not .*)?{a.name}[ ,:]", text, re.M) for a in algorithms("allreduce"))
    assert "2 µs a message, 1 GB/s" in text and "between nodes 5 µs a message, 12.5 GB/s" in text


def test_explain_elsewhere_as_json_has_the_model_and_all_candidates():
    told = json.loads(call("explain", "barrier", "--ranks", "1K", "--json"))
    assert (told["ranks"], told["nodes"], told["link"]) == (1024, 1, None)
    assert told["model"] == {"alpha": 1e-6, "beta": 1e-10, "gamma": 5e-11}
    found = {each["algorithm"]: each for each in told["candidates"]}
    assert set(found) == {a.name for a in algorithms("barrier")}
    assert found["dissemination"] == {
        **{"algorithm": "dissemination", "can": True, "why": ""},
        **{"expected_s": pytest.approx(1e-5), "rounds": 10, "messages": 10, "bytes": 0},
    }
    assert "one node" in found["hierarchical"]["why"] and not found["hierarchical"]["can"]


def test_explain_elsewhere_names_those_without_times_below_the_table():
    text = call("explain", "barrier", "--ranks", "4")
    assert "not hierarchical, hierarchical_leaders: one node: nothing is between nodes" in text
    assert not re.search("^hierarchical", text, re.M)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("barrier 64K --ranks 4", "65536 bytes: barrier has no data"),
        ("barrier --bytes 8", "8 bytes: barrier has no data"),
        ("allreduce --ranks 4 --link 1e-6,1e-9", "--link: only with two --nodes or more"),
        ("allreduce --ranks 1G", "1073741824 ranks: expected at most"),
        ("allreduce 99999999999999999999", "too large a size"),
    ],
)
def test_explain_of_what_it_could_only_ignore_or_not_count_is_refused(words, error):
    done = CliRunner().invoke(main, ["explain", *words.split()])
    assert done.exit_code == 2 and error in " ".join(done.output.split())


def test_explain_elsewhere_in_a_job_is_refused(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    done = CliRunner().invoke(main, ["explain", "allreduce", "--ranks", "4"])
    assert done.exit_code == 2 and "--ranks 4: this job has 2 ranks" in done.output


def test_list_explains_its_names():
    legend = " ".join(call("list").splitlines()[-10:])
    for word in ("tree:K", "hierarchical/LOCAL/ACROSS", "m nodes"):
        assert word in legend
    for word in ("native", "symmetric", "staged", "single_copy"):
        assert f"{word}, " in legend


@pytest.mark.parametrize("columns", ["80", "120"])
def test_list_fits_the_terminal(columns, monkeypatch):
    """No word is cut, no column has single words, and the costs are there."""
    monkeypatch.setenv("MPIDIST_TERMINAL", columns)
    monkeypatch.setenv("NO_COLOR", "1")
    text = re.sub("\x1b\\[[0-9;]*m", "", call("list"))
    assert all(len(line) <= int(columns) for line in text.splitlines())
    entries = len(algorithms(one_sided=True)) + len(schedules())
    assert "…" not in text and len(text.splitlines()) < 5 * entries
    for algorithm in map(describe, algorithms("allreduce", one_sided=True)):
        found = re.search(rf"^ +{algorithm['algorithm']}(:K)? .*", text, re.MULTILINE)
        for cost in (algorithm["rounds"], algorithm["bytes_per_rank"]):
            assert found and " ".join(cost.split()[:2]) in found[0]


def test_help_has_a_line_per_command(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert "..." not in call("--help").partition("Commands:")[2]


def test_show_of_a_wide_picture_says_how_to_draw_one_that_fits():
    assert "columns wide" not in call("show", "allreduce", "ring", "--ranks", "5")
    told = call("show", "allreduce", "ring", "--ranks", "33")
    assert "columns wide" in told and "--svg FILE" in told and "--ranks 8" in told


def test_list_as_json():
    rows = json.loads(call("list", "--json"))
    assert len(rows) == len(algorithms(one_sided=True))
    assert all(row["rounds"] and row["bytes_per_rank"] and row["summary"] for row in rows)
    by_name = {(row["collective"], row["algorithm"]): row for row in rows}
    assert "even" in by_name["allgather", "neighbor_exchange"]["requires"]
    assert by_name["allreduce", "linear"]["ordered"]
    ours = json.loads(call("list", "barrier", "--json"))
    assert {row["collective"] for row in ours} == {"barrier"}


def test_a_users_algorithm_is_listed_and_proved(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(MINE)
    try:
        assert "Go round as I like it." in call("list", "allreduce", "--import", str(script))
        args = ("prove", "--import", str(script), "--algorithm", "mine", "--ranks", "1-5")
        assert "1 algorithm, 5 proofs" in call(*args)
    finally:
        unregister("allreduce", "mine")


def test_failing_user_file_is_named(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("x = 1\nraise ValueError('oh no')\n")
    text = call("list", "--load", str(script), status=1)
    assert f"--import {script}, line 2: ValueError: oh no" in text
    assert "Traceback" not in text
    for missing in ("no_such_module", "no_such_file.py"):
        assert f"--import {missing}: no such file" in call("list", "--import", missing, status=2)


def test_show_draws_text_and_pictures(tmp_path):
    text = call("show", "allreduce", "ring", "--ranks", "3")
    assert "allreduce ring on 3 ranks" in text and "rank 2" in text
    tree = call("show", "broadcast", "tree:3", "--root", "1")
    assert "arity 3" in tree and tree == call("show", "broadcast", "tree", "--root=1", "--arity=3")
    target = tmp_path / "tree.svg"
    call("show", "reduce", "tree", "--ranks", "4", "--svg", str(target))
    assert target.read_text().startswith("<svg")
    nodes = call("show", "allreduce", "hierarchical", "--ranks", "4", "--nodes", "2,2")
    assert nodes != call("show", "allreduce", "hierarchical", "--ranks", "4")


def test_what_cannot_be_drawn_says_why():
    args = ("show", "allgather", "neighbor_exchange", "--ranks", "3")
    assert "expected an even number" in call(*args, status=1)


def test_prove_prints_totals():
    text = call("prove", "--ranks", "1-6", "--collective", "allreduce,barrier")
    assert text.splitlines()[-1].endswith("all proved")
    assert "NO" not in text.split()


def test_prove_as_json():
    report = json.loads(call("prove", "--ranks", "3,4", "--algorithm", "ring", "--json"))
    assert report["proved"] and report["proofs"] == 6
    assert {row["name"] for row in report["rows"]} == {"ring"}


def test_prove_names_a_meeting_that_nothing_needs(tmp_path):
    script = tmp_path / "twice.py"
    script.write_text(
        "from mpidist.schedule import Meet, algorithm\n"
        "@algorithm('barrier', 'twice', memory='mapped')\n"
        "def twice(rank, size):\n"
        "    yield Meet(range(size))\n"
        "    yield Meet(range(size))\n"
    )
    try:
        words = ("prove", "--import", str(script), "barrier", "twice", "--ranks", "1-4")
        text = call(*words, "--needless")
        assert "barrier twice: meeting 1 of all ranks, on 2-4 ranks" in text
        assert "barrier twice: meeting 2 of all ranks, on 2-4 ranks" in text
        found = json.loads(call(*words, "--needless", "--json"))["needless"]
        assert [each["sizes"] for each in found] == [[2, 3, 4], [2, 3, 4]]
        assert "needless" not in call(*words) + call(*words, "--json")
    finally:
        unregister("barrier", "twice")
    assert "nothing can be left out" in call("prove", "barrier", "--ranks", "3", "--needless")


def test_prove_takes_algorithms_after_a_collective():
    """As `show` does, but several of both."""
    words = ("allreduce", "broadcast", "in_place", "tree:3", "--algorithm", "ring")
    rows = json.loads(call("prove", *words, "--ranks", "2-4", "--json"))["rows"]
    found = {(row["collective"], row["name"]) for row in rows}
    assert found == {
        *(("allreduce", name) for name in ("in_place", "tree", "ring")),
        *(("broadcast", name) for name in ("in_place", "tree")),
    }


def test_prove_fails_with_the_counter_example(tmp_path):
    script = tmp_path / "wrong.py"
    script.write_text(
        "from mpidist.schedule import Recv, Send, algorithm\n"
        "@algorithm('broadcast', 'half')\n"
        "def half(rank, size, *, root):\n"
        "    '''Reach one rank only.'''\n"
        "    if rank == root and size > 1: yield Send((root + 1) % size)\n"
        "    elif rank == (root + 1) % size and size > 1: yield Recv(root)\n"
    )
    try:
        args = ("prove", "--import", str(script), "--algorithm", "half", "--ranks", "1-4")
        text = call(*args, status=1)
    finally:
        unregister("broadcast", "half")
    assert "counter-example: broadcast half: 3 ranks, root 0" in text
    assert "1 NOT proved" in text


def test_a_plan_of_mscclpp_is_proved(tmp_path):
    path = mscclpp.written(tmp_path, mscclpp.allgather(2), "pair.json")
    words = ("prove", str(path), "--needless")
    assert "allgather   pair.json  2 " in call(*words[:2])
    assert "nothing can be left out" in call(*words)
    both = call("prove", str(path), "allgather", "ring", "--ranks", "2", status=2)
    assert "--ranks" in both
    script = tmp_path / "nothing.py"
    script.write_text("")
    for option, value in (("--arity", "3"), ("--jobs", "3"), ("--import", str(script))):
        text = call(*words[:2], option, value, status=2)
        assert f"{option}: only for algorithms of collectives, not for a plan" in text
    assert "all proved" in call(*words[:2], "allgather", "ring", "--jobs", "1")
    lines = mscclpp.written(tmp_path, mscclpp.allgather(2), "a\n\x1bb.json")
    assert r"allgather   a \x1bb.json  2 " in call("prove", str(lines))
    rows = json.loads(call("prove", str(path), "allgather", "ring", "--json"))["rows"]
    assert [row["name"] for row in rows] == ["ring", "pair.json"]

    content = mscclpp.allgather(2)
    for gpu in content["gpus"]:
        ops = gpu["threadblocks"][0]["ops"]
        ops += [op for op in ops if op["name"] in ("signal", "wait")][-2:]
    mscclpp.written(tmp_path, content, "pair.json")
    text = call(*words)
    assert "needless: allgather pair.json: GPU 0, thread block 0, operation 6 (signal)" in text
    del content["gpus"][0]["threadblocks"][0]["ops"][-1]
    mscclpp.written(tmp_path, content, "pair.json")
    text = " ".join(call(*words[:2], status=1).split())
    assert "counter-example: allgather pair.json:" in text and "race: " in text
    assert "thread block 0, operation" in text and "NOT proved" in text
    content["gpus"][0]["threadblocks"][0]["ops"][0] = {"name": "ppkt"}
    mscclpp.written(tmp_path, content, "pair.json")
    assert "operation 0 (ppkt): packets (LL) are not" in call(*words, status=1)


def test_an_msccl_file_is_proved_and_drawn(tmp_path):
    path = tmp_path / "pair.xml"
    path.write_text(GOLDEN, encoding="utf-8")
    assert "allreduce   pair.xml   2 " in call("prove", str(path))
    given = ("show", "allreduce", "pair.xml", "--ranks", "2")
    assert "pair.xml on 2 ranks: 2 blocks, 2 messages in a row" in call(
        *given, "--import", str(path)
    )
    path.write_text(GOLDEN.replace('type="rrcs"', 'type="rcs"'), encoding="utf-8")
    assert "pair.xml: rank 0, round 1, block 0: ends with" in call("prove", str(path), status=1)
    path.write_text(GOLDEN.replace('type="s"', 'type="x"'), encoding="utf-8")
    assert 'pair.xml, line 5: <step type="x">: expected' in call("prove", str(path), status=2)
    unregister("allreduce", "pair.xml")


def test_spans_of_numbers():
    assert spans((1, 2, 3, 4, 7)) == "1-4, 7"
    assert spans((2, 4, 6, 8)) == "2, 4, … 8"
    assert spans(()) == ""


# -- run -----------------------------------------------------------------------------------------


def test_run_prints_its_command(monkeypatch):
    for name in [n for n in os.environ if n.startswith(("OMPI_", "PRTE_", "OMP_"))]:
        monkeypatch.delenv(name)  # what is set already is not set again
    words = shlex.split(
        call("run", "-n", "3", "--dry-run", "--", "mpidist", "demo", "--epochs", "2")
    )
    at = words.index("-n")
    assert words[at - 1].endswith(("mpiexec", "mpirun"))
    program = [sys.executable, "-m", "mpidist", "demo", "--epochs", "2"]
    assert words[at:] == ["-n", "3", *program]
    assert words[0] == "env" and all("=" in word for word in words[1 : at - 1])


@pytest.mark.parametrize(
    ("given", "started"),
    [
        (["-m", "pkg.train", "--lr", "1"], [sys.executable, "-m", "pkg.train", "--lr", "1"]),
        (["-c", "print(1)"], [sys.executable, "-m", "mpi4py", "-c", "print(1)"]),
        (["python", "-V"], [sys.executable, "-V"]),
        ([sys.executable, "x.py"], [sys.executable, "-m", "mpi4py", "x.py"]),
        (["/usr/bin/env", "x.py"], ["/usr/bin/env", "x.py"]),
        (["python", "x.py", "-m"], [sys.executable, "-m", "mpi4py", "x.py", "-m"]),
        (
            ["python3", "-u", "-W", "error", "-c", "1"],
            [sys.executable, "-u", "-W", "error", "-m", "mpi4py", "-c", "1"],
        ),
        (["python", "-Om", "pkg"], [sys.executable, "-Om", "pkg"]),
        (["python", "-m", "pkg"], [sys.executable, "-m", "pkg"]),
        (["echo", "-n", "x"], ["echo", "-n", "x"]),
    ],
)
def test_run_knows_scripts_modules_and_programs(given, started):
    words = shlex.split(call("run", "-n", "2", "--dry-run", *given))
    assert words[-len(started) :] == started


@pytest.mark.parametrize("quiet", [[], ["-q"], ["--quiet"]])
def test_run_prints_what_it_starts(monkeypatch, quiet, capfd):
    """The command, without the variables, which --dry-run prints; nothing with --quiet."""
    monkeypatch.setattr("mpidist.launcher.job.start", lambda *_: (0, True))
    with pytest.raises(SystemExit) as ended:
        main(["run", *quiet, "-n", "2", "-c", "pass"])
    assert ended.value.code == 0
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == (0 if quiet else 1)
    assert not any("OMP_NUM_THREADS" in line for line in lines)


def test_run_quiet_and_dry_run_contradict_each_other(capfd):
    with pytest.raises(SystemExit) as ended:
        main(["run", "-q", "-n", "2", "--dry-run", "-c", "pass"])
    assert ended.value.code == 2
    assert "--dry-run" in capfd.readouterr().err


def test_run_passes_options_of_the_script(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    words = shlex.split(call("run", "-n", "2", "--dry-run", str(script), "--dry-run", "-n", "9"))
    program = [sys.executable, "-m", "mpi4py", str(script), "--dry-run", "-n", "9"]
    assert words[-len(program) :] == program


def test_settings_are_those_that_the_machine_needs():
    few = environment_for("Open MPI", 2, 4, False, {})
    assert few == {"OMP_NUM_THREADS": "2", "OMPI_MCA_btl": "^ofi", "OMPI_MCA_mtl": "^ofi"}
    many = environment_for("Open MPI", 8, 4, True, {"OMP_NUM_THREADS": "3"})
    assert many["PRTE_MCA_rmaps_default_mapping_policy"] == ":oversubscribe"
    assert many["OMPI_ALLOW_RUN_AS_ROOT"] == many["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"
    assert "OMP_NUM_THREADS" not in many  # the user's stays
    assert environment_for("MPICH", 8, 4, True, {}) == {"OMP_NUM_THREADS": "1"}


def test_run_inside_of_a_job_is_refused():
    for environ in (
        {"OMPI_COMM_WORLD_RANK": "0"},
        {"PMI_RANK": "3"},
        {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"},
    ):
        with pytest.raises(LaunchError, match=rf"\brank {list(environ.values())[-1]}\b"):
            check_not_nested(environ)
    # in an allocation, not in a step of several tasks: that is where mpirun belongs
    check_not_nested({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"})
    check_not_nested({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"})


def test_launched_rank():
    assert launched_rank({}) is None
    assert launched_rank({"PMI_RANK": "2"}) == 2


# -- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("list reduze", "did you mean 'reduce'"),
        ("show allreduce rign", "ALGORITHM … 'rign' … did you mean 'ring'"),
        ("show allredcue ring", "COLLECTIVE … 'allredcue' … did you mean 'allreduce'"),
        ("show 1f1", "SCHEDULE … '1f1' … 1f1b"),
        ("prove --pipeline 1f1", "--pipeline … '1f1' … 1f1b"),
        ("show allreduce tree:1", "arity '1': expected a number >= 2"),
        ("show allreduce ring --ranks 0", "--ranks … 0 is not … x>=1"),
        ("show reduce tree --ranks 4 --root 4", "--root=4 is not a rank: expected 0 … 3"),
        ("show allreduce ring --root 2", "--root: only for collectives with a root"),
        ("show allreduce ring --arity 3", "--arity … has no arity"),
        (
            "show allreduce ring --svg /no/such/folder/x.svg",
            "--svg … /no/such/folder/x.svg … an existing folder",
        ),
        ("show allreduce ring --ranks 4 --nodes 2,1", "whose sum is --ranks 4"),
        ("show allreduce ring --segments 0", "--segments … 0 is not … x>=1"),
        ("prove --ranks 0", "--ranks … 0 is too small … >= 1"),
        ("prove --ranks 3-", "--ranks … '3-' … expected whole numbers"),
        ("prove --ranks 5-3", "--ranks … '5-3' … FROM <= TO"),
        ("prove --arity 1", "--arity … 1 is too small … >= 2"),
        ("prove --jobs 0", "--jobs … 0 is not … x>=1"),
        ("prove --algorithm rign --ranks 2", "did you mean 'ring'"),
        ("prove --collective x --ranks 2", "unknown collective 'x'"),
        ("prove allredcue", "collective or algorithm 'allredcue' … did you mean 'allreduce'"),
        ("prove allreduce inplace", "allreduce algorithm 'inplace' … did you mean 'in_place'"),
        ("prove allreduce tree:1", "arity '1': expected a number >= 2"),
        ("explain allreduce --bytes 1Q", "--bytes … '1Q' is not a size … 64K"),
        ("explain allreduce --ranks 0", "--ranks … '0': expected a whole number >= 1"),
        ("explain allreduce --ranks 1.5", "--ranks … '1.5': expected a whole number … such as 1M"),
        (
            "explain allreduce --ranks 12 --nodes 5",
            "12 ranks on 5 nodes: expected nodes with",
        ),
        (
            "explain allreduce --ranks 4 --nodes 8",
            "4 ranks on 8 nodes: expected nodes with",
        ),
        ("explain allreduce --nodes 2", "--nodes: only for a job that is not here, with --ranks"),
        ("explain allreduce --ranks 4 --op max", "--op: only for a call in this job, without --ra"),
        ("explain allreduce --ranks 4 --predict x", "--predict … 'x'"),
        ("explain allreduce --ranks 4 --link 1,1,1", "--link: expected two numbers"),
        ("bench", "Usage: mpidist bench"),
        ("bench allredcue", "did you mean 'allreduce'"),
        ("bench colectives", "did you mean 'collectives'"),
        ("bench collectives", "Missing argument … COLLECTIVE"),
        ("bench collectives allreduce rduce", "COLLECTIVE … 'rduce' … did you mean 'reduce'"),
        ("bench gpu barrier", "barrier … expected allreduce, reduce_scatter, allgather"),
        ("bench scaling --memory share", "--memory … 'share' is not one of"),
        ("bench allreduce --bytes 8,x", "--bytes … 'x' is not a size"),
        ("bench allreduce --bytes -8", "--bytes … '-8' is not a size"),
        ("bench allreduce --plot x.foo", "--plot … x.foo … ends in … .png"),
        ("show allreduce nativ --ranks 2", "ALGORITHM … 'nativ' … known: binomial"),
        ("show allreduce native", "native is not a schedule"),
        ("list foo", "unknown collective 'foo' … known: … pipeline, reduce"),
        ("completion ksh", "'ksh' is not one of 'bash', 'zsh', 'fish'"),
        ("slurm trian_ddp", "did you mean 'train_ddp'"),
        ("bench allreduce --compare a.json b.json", "No such option … --compare"),
        ("bench compare a.json b.json --plot x.doc", "x.doc: expected a name that ends in"),
        ("bench compare no-a.json no-b.json", "no-a.json … No such file"),
        ("bench ddp --op max", "No such option … --op"),
        ("bench ddp allreduce", "unexpected extra argument … allreduce"),
        ("bench ddp --parameters 4,x", "--parameters … '4,x' … in millions"),
        ("bench ddp --parameters 0", "--parameters … '0' … expected positive numbers"),
        ("bench ddp --overlap --parameters 4", "--parameters … only for steps without --overlap"),
        ("bench ddp --model gpt3", "--model … 'gpt3' is not one of"),
        (
            "bench ddp --model moe --parameters 4",
            "--parameters … only for steps without --overlap or --model",
        ),
        ("bench ddp --model moe --overlap", "--model … only for steps without --overlap"),
        ("bench ddp --device tpu", "--device … 'tpu' is not one of 'cpu', 'cuda'"),
        ("bench ddp --overlap --device cuda", "--device … only for steps without --overlap"),
        ("bench ddp --overlap --elastic", "--elastic … only for steps without --overlap"),
        ("bench torch --step fsdp3", "--step … 'fsdp3' is not one of"),
        (
            "bench torch --step fsdp2 all_reduce",
            "COLLECTIVE … only for collectives",
        ),
        ("bench torch --step fsdp2 --bytes 8", "--bytes … only for collectives, without --step"),
        ("bench torch --width 64", "--width … only for training steps, with --step"),
        ("bench ddp --overlap", "bench ddp --overlap on 1 rank … expected 2 or more"),
        ("bench pipeline", "bench pipeline on 1 rank … expected 2 or more"),
        ("bench allreduce --overlap", "No such option … --overlap"),
        ("bench ddp --iterations 0", "--iterations … 0 is not … x>=1"),
        ("bench overhead allreduce", "unexpected extra argument … allreduce"),
        ("bench allreduce --dtype float31", "--dtype … dtype 'float31'"),
        ("bench allreduce --iterations 0", "--iterations … 0 is not … x>=1"),
        ("bench allreduce --budget -1", "--budget … -1.0 is not … x>=0"),
        ("bench allreduce --json /no/such/folder/x.json", "--json … /no/such/folder/x.json"),
        ("calibrate", "calibrate: 1 rank: expected two or more"),
        ("calibrate -o /no/such/folder/x.json", "-o … /no/such/folder/x.json"),
        ("calibrate --budget 0", "--budget … invalid duration '0' … positive"),
        ("tune", "one of -o FILE and --verify FILE"),
        ("tune -o a.json --verify b.json", "one of -o FILE and --verify FILE"),
        ("tune -o a.json --json b.json", "--json … only for --verify"),
        ("tune allredcue -o a.json", "did you mean 'allreduce'"),
        ("tune -o a.json --budget 1d", "--budget … invalid duration '1d' … such as 60s"),
        ("tune -o a.json --budget 0", "--budget … invalid duration '0' … positive"),
        ("tune -o /no/such/folder/x.json", "-o … /no/such/folder/x.json"),
        ("tune --export openmpi", "--export openmpi … mpidist export openmpi"),
        ("tune --verify /no/such/file.json", "/no/such/file.json: No such file"),
        ("explain allreduce --memory share", "'share' is not one of"),
        ("export goal allreduce ring --bytes 8", "Missing option … --ranks"),
        (
            "export goal allreduce nativ --ranks 2 --bytes 8",
            "ALGORITHM … 'nativ' … known: binomial",
        ),
        (
            "export goal barrier dissemination --ranks 2 --bytes 8",
            "--bytes 8: barrier has no data: expected 0",
        ),
        ("export gaol", "gaol"),
        (
            "export msccl allreduce ring --ranks 2 --protocol X -o x",
            "protocol='X': expected Simple,",
        ),
        ("export openmpi -o x", "Missing option … --ranks"),
        ("export openmpi --ranks 1 -o x", "--ranks … 1 is too small … >= 2"),
        ("export openmpi --ranks 2 --predict 1e-6 -o x", "--predict … '1e-6' … byte combined"),
        ("export openmpi scan --ranks 4 --predict 1e-6,0 --version 5 -o x", "scan: Open MPI"),
        (
            "export openmpi --ranks 4 --predict 1e-6,0 --version 5 --check -o x",
            "--check … measured rules",
        ),
        ("export openmpi --ranks 4 --version 3 -o x", "--version … '3' is not one of"),
        ("export nccl --ranks 4 -o x", "--predict is missing"),
        ("export han --nodes 4 --predict 1e-6,0 --link 1,0 -o x", "--nodes 4 … two nodes or more"),
        ("export han --nodes 2,2 --predict 1e-6,0 --link 1,0,0 -o x", "--link … two numbers"),
        ("export nccl broadcast --ranks 4 --predict 1e-6,0 -o x", "broadcast: NCCL"),
        ("demo --bytes-limit 3", "--bytes-limit … '3' … at least 4 bytes"),
        ("demo --report /no/such/folder/x.html", "--report … /no/such/folder/x.html"),
        ("run -n 0 train.py", "-n … 0 is not … x>=1"),
        ("run -n 2 no_such_script.py", "no_such_script.py: no such script"),
        ("run -n 2 demo", "demo … did you mean: mpidist demo"),
        ("run -n 2 --fast x.py", "--fast: not an option of mpidist run"),
        ("run -n 2 --hang-kill 5 --roll-call 3 -- true", "--hang-kill 5: … no --roll-call"),
        ("run -n 2", "PROGRAM"),
        ("run x.py", "x.py: no such script"),
        ("prove x.csv", "'x.csv'; known: allgather, allreduce, alltoall, barrier, binomial, broad"),
        ("prove --pipeline 1f1b allreduce", "COLLECTIVE … only for algorithms"),
        ("lisd", "unknown command 'lisd'; did you mean 'list'"),
        ("list --jsno", "No such option"),
    ],
)
def test_bad_input(arguments, told):
    """The message has all of this, in this order: option, value, what is expected."""
    text = call(*arguments.split(), status=2)
    pattern = ".*".join(re.escape(part) for part in told.split(" … "))
    assert re.search(pattern, text, re.DOTALL), text
    assert "Traceback" not in text
    if "Examples:" not in text:  # the help of a group
        assert text.count("mpidist: error:") == 1 and "Usage:" not in text
        busy = "warning: other processes"  # of a machine that runs other tests, too
        assert len([line for line in text.splitlines() if not line.startswith(busy)]) == 1


@pytest.mark.parametrize(
    "command", ["bench ddp", "bench ddp --model gpt2", "bench torch", "bench torch all_reduce"]
)
def test_a_device_that_is_not_there_is_bad_input(monkeypatch, command):
    try:
        import torch
    except ImportError:
        pytest.skip("needs PyTorch")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    text = call(*command.split(), "--device", "cuda", status=2)
    assert "mpidist: error: --device cuda: on rank 0: Unsupported: PyTorch" in text
    assert "is built without CUDA" in text and "Traceback" not in text


@pytest.mark.parametrize(
    ("missing", "options"),
    [
        ("matplotlib", ("bench", "allreduce", "--plot", "x.png")),
        ("matplotlib", ("demo", "--report", "x.html")),
        ("jinja2", ("bench", "allreduce", "--report", "x.html")),
        ("jinja2", ("demo", "--report", "x.html")),
    ],
)
def test_missing_package_is_named_first(monkeypatch, missing, options):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else find(name)
    )
    text = call(*options, status=1)
    assert f"needs {missing}" in text and f"pip install {missing}" in text


def test_foreign_errors_keep_their_traceback(monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr("mpidist.commands.list.algorithms", broken)
    result = CliRunner().invoke(main, ["list"])
    assert isinstance(result.exception, ZeroDivisionError)


def test_python_m_mpidist_and_closed_pipe():
    command = [sys.executable, "-m", "mpidist", "list"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment())
    assert done.returncode == 0 and "allreduce" in done.stdout and not done.stderr
    cut = subprocess.run(
        ["sh", "-c", f"{shlex.join(command)} | head -n 1"],
        capture_output=True,
        text=True,
        timeout=200,
        env=environment(),
    )
    assert cut.stdout.startswith("collective") and not cut.stderr


def test_only_rank_0_prints(monkeypatch):
    monkeypatch.setattr("mpidist.commands.main.REPORT_SECONDS", 0)
    assert main.context_settings["help_option_names"]
    monkeypatch.setenv("PMI_RANK", "1")
    assert call("list", "nothing", status=2) == ""
    assert call("nothing", status=2) == ""
    monkeypatch.setenv("PMI_RANK", "0")
    assert "unknown collective" in call("list", "nothing", status=2)
    assert isinstance(main, click.Group)


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("bench all", "allreduce allgather alltoall"),
        ("bench over", "overhead"),
        ("bench allreduce --algorithms rin", "ring"),
        ("show allreduce ri", "ring"),
        ("show zb-", "zb-h1 zb-h2 zb-v"),
        ("prove --algorithm ring,rab", "ring,rabenseifner"),
        ("prove allred", "allreduce"),
        ("prove barrier diss", "dissemination"),
        ("explain reduce_", "reduce_scatter"),
        ("slurm train_r", "train_requeue"),
        ("prove --pipeline 1f1b,gp", "1f1b,gpipe"),
        ("comp", "completion"),
    ],
)
def test_completion(words, completed):
    arguments = {"COMP_WORDS": f"mpidist {words}", "COMP_CWORD": str(len(words.split()))}
    env = arguments | {"_MPIDIST_COMPLETE": "bash_complete"}
    done = CliRunner().invoke(main, [], prog_name="mpidist", env=env)
    assert done.output.split() == [f"plain,{word}" for word in completed.split()]


def test_list_says_what_is_needed():
    lines = call("list", "allgather").splitlines()
    at = lines[0].index("summary")
    text = " ".join(line[at:] for line in lines)
    assert "(needs an even number of ranks)" in text
    assert "(needs equally many ranks on every node)" in text


def commands(group):
    """Yield the words and the command of each command of a group, and of its groups."""
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        if isinstance(command, click.Group):
            yield from ((f"{name} {words}", one) for words, one in commands(command))
        else:
            yield name, command


@pytest.mark.parametrize(("words", "command"), [*commands(main)])
def test_each_file_is_completed_as_one(words, command):
    """A parameter whose placeholder is a file or folder asks the shell for one."""
    context = click.Context(command)
    for parameter in command.params:
        shown = str(parameter.metavar).rstrip(".")
        if shown.endswith((".json", "FILE", "FOLDER", "DIR", "PATH")):
            found = parameter.shell_complete(context, "x")
            assert [item.type for item in found] in (["file"], ["dir"]), (words, parameter.name)


def test_ranks_and_stages_are_one():
    assert call("show", "1f1b", "--ranks", "3") == call("show", "1f1b", "--stages", "3")
    for words in (["--ranks", "2"], ["--stages", "2"]):
        rows = json.loads(call("prove", "--pipeline", "gpipe", "--json", *words))["rows"]
        assert [row["sizes"] for row in rows] == [[2]]


def test_a_schedule_of_ones_own_by_file_or_module(tmp_path, monkeypatch):
    text = "from mpidist.pipeline import B, F\n\n"
    text += "def mine(rank, size, microbatches):\n"
    text += "    yield from (F(k) for k in range(microbatches))\n"
    text += "    yield from (B(k) for k in range(microbatches))\n"
    (tmp_path / "of_mine.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    for name in ("of_mine.py:mine", "of_mine:mine"):
        assert "2 microbatches" in call("show", name, "--microbatches", "2")
        assert "all proved" in call("prove", "--pipeline", name, "--ranks", "2")


def test_slurm_cuts_no_sentence(monkeypatch):
    for columns in ("0", "80"):
        monkeypatch.setenv("MPIDIST_TERMINAL", columns)
        monkeypatch.setenv("NO_COLOR", "1")
        text = " ".join(re.sub("\x1b\\[[0-9;]*m", "", call("slurm")).split())
        assert "the ranks save a checkpoint, and the job requeues itself" in text
        assert len(re.findall(r"\.(?= [a-z_]+ [A-Z]|$)", text)) == len(scripts())


def test_a_missing_file_is_named_once():
    text = call("bench", "compare", "no-a.json", "no-b.json", status=2)
    assert text.count("no-a.json") == 1 and "Errno" not in text

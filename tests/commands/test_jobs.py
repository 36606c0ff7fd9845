"""The command line in real jobs, started by ``mpidist run``, each with a time limit."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpidist.schedule import COLLECTIVES
from mpidist.selection.tuning import TuningTable
from mpidist.shared_memory.in_place import NEEDS
from tests.support.jobs import each_mpi
from tests.support.processes import end, environment, run

LIMIT = 200  # seconds; each takes a few
ENOUGH = "60s"  # for a tuner that ends when all is measured: seconds, on a loaded machine more


def plain():
    """Return an environment without what `mpidist run` has to find out by itself."""
    of_mpi = ("OMPI_", "PRTE_", "OMP_", "OPENBLAS_NUM")
    kept = {k: v for k, v in environment().items() if not k.startswith(of_mpi)}
    root = str(Path(__file__).resolve().parents[2])
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, [root, kept.get("PYTHONPATH")]))}


def mpidist(*arguments, ranks=2, status=0, cwd=None):
    """Run a command of mpidist on some ranks; 0: on none, without a launcher."""
    start = [sys.executable, "-m", "mpidist"]
    if ranks:
        start += ["run", "-n", str(ranks), "--"]
        arguments = ("mpidist", *arguments) if not arguments[0].endswith(".py") else arguments
    done = run([*start, *arguments], LIMIT, env=plain(), cwd=cwd)
    assert done.status is not None, f"timed out\n{done.output}"
    assert (done.status == status) if status is not None else done.status, done.output
    return done.output


@pytest.mark.long
def test_info_tells_of_all_ranks_once():
    text = mpidist("info", ranks=2)
    assert text.count("thread level") == 1
    assert "2 on 1 node" in text and "mpi4py" in text
    assert any(vendor in text for vendor in ("Open MPI", "MPICH"))
    assert "GPU" in text and "reduce_scatter" in text
    told = json.loads(mpidist("info", "--json", ranks=2).partition("\n")[2])
    assert set(told["line_ns"]) == {"before", "after"}
    assert all(ns is None or 10 < ns < 3000 for ns in told["line_ns"].values())


def test_info_on_one_rank_without_a_launcher():
    assert "1 on 1 node" in mpidist("info", ranks=0)


def test_info_as_json_has_facts():
    found = json.loads(mpidist("info", "--json", ranks=0))
    assert (found["ranks"], found["ranks_per_node"]) == (1, [1])
    assert list(found["hosts"].values()) == [1] and found["versions"]["mpi4py"]
    assert found["mpi"]["vendor"] in ("Open MPI", "MPICH") and found["mpi"]["thread_level"]
    assert found["deadline_s"] == 60 and found["cores"]["oversubscribed"] is False
    assert (found["gpus"], found["slurm"], found["network"]) == ([], None, None)
    assert set(found["gpu_missing"][0]) == {"rank", "note"}


def test_explain_says_what_and_why():
    text = mpidist("explain", "allgather", "--bytes", "8K", ranks=3)
    assert "3 ranks" in text and "native" in text
    assert "expected an even number" in text


def test_explain_has_times_of_shared_memory():
    text = mpidist("explain", "allreduce", "--bytes", "64K", "--memory", "symmetric", ranks=2)
    rows = [line.split() for line in text.splitlines()]
    taken = next(words for words in rows if words[:2] == ["symmetric", "taken"])
    named = next(words for words in rows if words[:2] == ["symmetric", "in_place"])
    assert named[2] == "yes" and float(named[3]) > 0, "predicted"
    assert float(taken[2]) > 0, "measured"
    assert "µs for each rank in a meeting" in text
    told = mpidist("explain", "reduce", "--memory", "symmetric", "--json", ranks=2)
    told, _ = json.JSONDecoder().raw_decode(told[told.index("{") :])
    assert told["calibration"]["mapped"]["meeting"] > 0
    found = {(one["executor"], one["algorithm"]): one for one in told["candidates"]}
    assert found["staged", ""]["expected_s"] > 0
    assert found["symmetric", "in_place_one_shot"]["expected_s"] > 0


def test_explain_barrier():
    text = mpidist("explain", "barrier", ranks=2)
    assert "barrier, 2 ranks on 1 node: symmetric" in text
    assert "shipped rule: symmetric at every size" in text and "0 B" not in text


@pytest.mark.long
def test_explain_shows_what_is_taken(monkeypatch):
    """An algorithm of two levels stands in the table by its full name, with its time."""
    monkeypatch.setenv("MPIDIST_RANKS_PER_NODE", "1")
    text = mpidist("explain", "allreduce", "--bytes", "1M", ranks=2)
    taken = [line.split() for line in text.splitlines() if " taken " in line]
    assert [words[:2] for words in taken] == [
        ["messages", "hierarchical/direct/recursive_doubling"]
    ]
    assert float(taken[0][3].replace(",", "")) > 0
    text = mpidist("explain", "barrier", ranks=2)
    assert "hierarchical_leaders, expected" in text, "chosen as for no bytes, not for 1M"


@pytest.mark.long
def test_bench_writes_json_plot_and_page(tmp_path):
    text = mpidist(
        *(
            "bench",
            "allreduce",
            "broadcast",
            "--bytes",
            "8,10K",
            "--algorithms",
            "native,ring,chain",
        ),
        *("--budget", "0.1", "--json", "a.json", "--plot", "a.svg", "--report", "a.html"),
        cwd=tmp_path,
    )
    assert text.count("allreduce, 2 ranks, float32, sum") == 1
    found = json.loads((tmp_path / "a.json").read_text())
    assert {(r["work"], r["candidate"], r["bytes"]) for r in found["rows"]} == {
        (collective, algorithm, nbytes)
        for collective, own in (("allreduce", "ring"), ("broadcast", "chain"))
        for algorithm in ("mpi4py", "native", own)
        for nbytes in (8, 10240)
    }
    row = found["rows"][0]
    assert set(row["figures"]) >= {"used_us", "used_ratio"}
    assert all(r["figures"]["used_us"] > r["time_us"] / 2 for r in found["rows"])
    assert set(row) | {"spread"} == {
        *("work", "candidate", "backend", "ranks", "bytes", "dtype", "op", "in_place"),
        *("time_us", "algbw_gbs", "busbw_gbs", "ratio", "correct", "memory", "spread", "figures"),
    }
    assert all(r["correct"] and r["time_us"] > 0 and r["ratio"] > 0 for r in found["rows"])
    assert {r["candidate"]: r["ratio"] for r in found["rows"]}["mpi4py"] == 1.0
    header = found["header"]
    assert ("line_ns" in header) == ("round trip of a cache line" in text)
    assert header["ranks"] == 2 and header["mpi"]["vendor"] and header["versions"]["numpy"]
    assert "bench allreduce broadcast" in header["command"]
    assert (tmp_path / "a.svg").read_text().count("<svg") == 1
    page = (tmp_path / "a.html").read_text()
    assert "broadcast" in page
    busy = header.get("busy", [])  # as the machine was
    assert all(f"cores of {host}" in page for host, _, _ in busy)
    assert ("times will scatter" in page) == ("times will scatter" in text) == bool(busy)


@pytest.mark.long
@pytest.mark.parametrize("in_place", [(), ("--in-place",)], ids=["apart", "in-place"])
def test_bench_in_symmetric_memory_keeps_private_baselines(tmp_path, in_place):
    every = [c for c in COLLECTIVES if c != "barrier"]
    names = ("--algorithms", "native,auto,symmetric,ring")
    args = ("--bytes", "40,100K", "--budget", "0.05", "--json", "a.json", *names, *in_place)
    text = mpidist("bench", *every, "--memory", "symmetric", *args, cwd=tmp_path)
    assert "WRONG" not in text
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    seen = {(row["work"], row["candidate"], row["memory"]) for row in rows}
    for collective in every:
        able = ("native", "auto", *["symmetric"] * (collective in NEEDS))
        assert {(a, m) for c, a, m in seen if c == collective and a != "ring"} == {
            *(("mpi4py", "private"), ("native", "private")),
            *((name, "symmetric") for name in able),
        }
    assert ("allreduce", "ring", "symmetric") in seen


def test_bench_on_one_rank():
    text = mpidist("bench", "allgather", "barrier", "--bytes", "64", "--budget", "0.05", ranks=0)
    assert "neighbor_exchange" in text.partition("not measured")[2]
    assert "WRONG" not in text


def test_bench_over_its_limit_says_so():
    text = mpidist(
        "bench", "reduce", "--bytes", "8", "--limit", "0", "--algorithms", "native", ranks=0
    )
    assert text.count("over the limit of 0 s") == 2


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["mine", "forgetful"])
def test_bench_of_a_users_algorithm(tmp_path, algorithm):
    (tmp_path / "mine.py").write_text(
        "from mpidist.schedule import algorithm\n"
        "from mpidist.algorithms.ring import allreduce_ring\n"
        "@algorithm('allreduce', 'mine', blocks=lambda size: size)\n"
        "def mine(rank, size):\n    '''A ring.'''\n    yield from allreduce_ring(rank, size)\n"
        "@algorithm('allreduce', 'forgetful')\n"
        "def forgetful(rank, size):\n    '''Nothing.'''\n    yield from ()\n"
    )
    args = ("bench", "allreduce", "--import", "mine.py", "--bytes", "100", "--budget", "0.05")
    status = 0 if algorithm == "mine" else None
    text = mpidist(*args, "--algorithms", algorithm, cwd=tmp_path, status=status)
    assert ("WRONG" in text) == (algorithm == "forgetful")
    assert any(line.split()[1:2] == [algorithm] for line in text.splitlines())


def test_overhead_prints_both_figures():
    text = mpidist("bench", "overhead")
    assert "engine, null backend" in text and "flight record of a call" in text
    assert re.search("allreduce of 8 bytes +native", text)


@pytest.mark.long
def test_torch_stands_beside_gloo():
    pytest.importorskip("torch", reason="needs PyTorch")
    text = mpidist("bench", "torch", "all_reduce", "--bytes", "4,64K", "--iterations", "2")
    assert "gloo" in text and "mpidist, async_op" in text and "WRONG" not in text


@pytest.mark.long
def test_demo_trains_compares_and_reports(tmp_path):
    text = mpidist(
        *("demo", "--epochs", "2", "--budget", "0.3", "--report", "r.html", "--json", "r.json"),
        cwd=tmp_path,
    )
    assert "replicas bit-identical: yes" in text and "as in one process: yes" in text
    assert "WRONG" not in text
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert {"mpi4py", "native", "ring", "rabenseifner"} <= {row["candidate"] for row in rows}
    page = (tmp_path / "r.html").read_text()
    assert page.count("<svg") == 2, "the plot for wide windows and for narrow ones"
    assert "test accuracy" in page


# -- what goes wrong ------------------------------------------------------------------------------


def test_error_of_all_ranks_is_printed_once():
    text = mpidist("explain", "alreduce", status=2)
    assert text.count("unknown collective 'alreduce'; did you mean") == 1
    assert "Traceback" not in text


@pytest.mark.long
def test_error_after_mpi_init_is_printed_once():
    text = mpidist("bench", "reduce", "--root", "2", "--bytes", "8", status=2)
    assert text.count("mpidist: error") == 1 and "root" in text
    text = mpidist("bench", "allreduce", "--dtype", "bool", "--op", "sum", status=None)
    assert text.count("mpidist: error") == 1 and "not defined for dtype bool" in text


def test_a_rank_that_fails_ends_the_job(tmp_path):
    script = tmp_path / "fail.py"
    script.write_text(
        "import mpidist\n"
        "comm = mpidist.init()\n"
        "if comm.rank == 1:\n    raise ValueError('boom')\n"
        "comm.barrier()\n"
    )
    text = mpidist(str(script), status=None)
    assert "ValueError: boom" in text and "rank 1 of 2 failed" in text


def test_the_exit_code_is_the_jobs(tmp_path):
    script = tmp_path / "exit.py"
    script.write_text("import sys\nprint('here', sys.argv[1:])\nsys.exit(int(sys.argv[1]))\n")
    assert "here ['0']" in mpidist(str(script), "0")
    mpidist(str(script), "3", ranks=1, status=3)


def test_run_within_a_job_is_refused():
    text = mpidist("run", "-n", "2", "x.py", status=2)
    assert text.count("mpidist run was itself started by an MPI launcher") == 1


def test_the_printed_command_works_when_pasted(tmp_path):
    script = tmp_path / "hello.py"
    script.write_text(
        "import mpidist\ncomm = mpidist.init()\nprint(f'<{comm.rank} of {comm.size}>')\n"
    )
    line = mpidist("run", "-n", "3", "--dry-run", str(script), ranks=0)
    done = run(shlex.split(line), LIMIT, env=plain())
    assert done.status == 0, done.output
    assert sorted(re.findall(r"<(\d) of 3>", done.output)) == ["0", "1", "2"], done.output


ENDS = {
    "raises": "from mpi4py import MPI\nc = MPI.COMM_WORLD\nc.recv() if c.rank else 1 / 0",
    "leaves": (
        "import os, mpidist\nc = mpidist.init()\nc.barrier()\n"
        "os._exit(0) if c.rank else c.recv(__import__('numpy').zeros(1), 1)"
    ),
}


@pytest.mark.long
@each_mpi
@pytest.mark.parametrize("how", ENDS)
def test_a_rank_that_ends_ends_the_job(python, how, tmp_path):
    """Also one that fails without mpidist, or says that all is well and never came to the end."""
    script = tmp_path / "ends.py"
    script.write_text(ENDS[how] + "\n")
    env = {**plain(), "MPIDIST_TIMEOUT": str(4 * LIMIT)}  # not the deadline ends it
    done = run([python, "-m", "mpidist", "run", "-n", "2", str(script)], LIMIT, env=env)
    assert done.status, done.output


KILLS = (
    "import os, signal\n"
    "folder = os.environ['PMIX_SERVER_TMPDIR']\n"
    "assert os.listdir(folder)\n"
    "open(__file__ + '.folder', 'w').write(folder)\n"
    "os.kill(int(folder.rpartition('.')[2]), signal.SIGKILL)\n"
)


@pytest.mark.parametrize("how", ["plain", "--label"])
def test_a_killed_launcher_leaves_no_files(how, tmp_path):
    """Open MPI's next launcher with the same process number would find them and end."""
    script = tmp_path / "kills.py"
    script.write_text(KILLS)
    options = [how] * (how != "plain")
    command = [sys.executable, "-m", "mpidist", "run", "-n", "1", *options, str(script)]
    done = run(command, LIMIT, env=plain())
    folder = Path(f"{script}.folder").read_text()
    assert done.status and not Path(folder).exists(), done.output


@pytest.mark.long
def test_tune_explain_and_verify(tmp_path):
    """A second run keeps what the first has found for another collective."""
    for collective in ("reduce", "barrier"):
        text = mpidist(
            *("tune", collective, "--bytes", "8,1K", "--budget", ENOUGH, "-o", "t.json", "--force"),
            cwd=tmp_path,
        )
        assert "measured in" in text
    keys = [
        (e["collective"], e["memory"])
        for e in json.loads((tmp_path / "t.json").read_text())["entries"]
    ]
    assert keys == [("barrier", "private"), ("reduce", "private"), ("reduce", "symmetric")]
    text = mpidist("explain", "reduce", "--bytes", "8", "--tuning", "t.json", cwd=tmp_path)
    assert "tuning table t.json: " in text and "measured, from the tuning table" in text
    verify = ("tune", "reduce", "--bytes", "8,1K", "--budget", ENOUGH, "--verify", "t.json")
    text = mpidist(*verify, "--json", "v.json", cwd=tmp_path)
    assert "noise floor" in text
    rows = json.loads((tmp_path / "v.json").read_text())["rows"]
    found = {(row["memory"], row["bytes"]) for row in rows}
    wanted = {(memory, size) for memory in ("private", "symmetric") for size in (8, 92, 1024)}
    # A machine that stops for a second leaves sizes out, and says how many.
    left_out = re.search(r"(\d+) sizes? left out, as the budget was too short", text)
    assert found <= wanted
    assert len(wanted - found) == (int(left_out[1]) if left_out else 0), text
    text = mpidist("tune", "--budget", ENOUGH, "--verify", "t.json", cwd=tmp_path)
    assert set(re.findall(r"^(\w+) +(?:private|symmetric) ", text, re.MULTILINE)) <= {
        "reduce",
        "barrier",
    }
    text = mpidist("tune", "gather", "--verify", "t.json", cwd=tmp_path, status=2)
    assert "no entry for gather; it has reduce, barrier" in text
    beyond = ("explain", "reduce", "--bytes", "1M", "--tuning", "t.json", "--json")
    text = mpidist(*beyond, cwd=tmp_path)
    told, _ = json.JSONDecoder().raw_decode(text[text.index("{") :])  # below the launch's command
    assert {candidate["expected_s"] for candidate in told["candidates"]} == {None}
    assert any("measured for 8 to " in candidate["basis"] for candidate in told["candidates"])


@pytest.mark.long
def test_calibrate_explain_tune_and_verify(tmp_path):
    """By its file "auto" chooses the least of the times that explain prints; a table joins it."""
    if len(os.sched_getaffinity(0)) < 2:
        text = mpidist("calibrate", cwd=tmp_path, status=2)
        assert "2 ranks share cores" in text
        return
    done = ("calibrate", "--budget", "1s", "-o", "m.json", "--force")
    text = mpidist(*done, cwd=tmp_path)
    assert "written to m.json" in text and re.search(r"^ *1M +\d", text, re.MULTILINE)
    shutil.copy(tmp_path / "m.json", tmp_path / "new.json")
    explain = ("explain", "allgather", "--bytes", "64K", "--tuning", "m.json", "--json")
    text = mpidist(*explain, cwd=tmp_path)
    told, _ = json.JSONDecoder().raw_decode(text[text.index("{") :])
    # Schedules in shared memory are predicted by their names, and the times of their executors are
    # measured: "auto" compares these.
    able = [one for one in told["candidates"] if one["can"]]
    able = [one for one in able if one["executor"] == "messages" or not one["algorithm"]]
    times = {one["algorithm"] or one["executor"]: one["expected_s"] for one in able}
    assert told["why"].startswith("cost model: ") and None not in times.values()
    assert times[told["choice"]] <= min(times.values()) / 0.95
    assert told["calibration"] == json.loads((tmp_path / "m.json").read_text())["calibrations"][0]
    tuned = ("tune", "barrier", "--budget", ENOUGH, "-o", "m.json", "--force")
    assert "written to m.json" in mpidist(*tuned, cwd=tmp_path)
    content = json.loads((tmp_path / "m.json").read_text())
    assert [entry["collective"] for entry in content["entries"]] == ["barrier"]
    assert content["calibrations"] == [told["calibration"]]
    mpidist(*done, cwd=tmp_path)
    again = json.loads((tmp_path / "m.json").read_text())
    assert again["entries"] == content["entries"] and len(again["calibrations"]) == 1
    verify = ("tune", "reduce", "--bytes", "8,1K", "--budget", ENOUGH, "--verify", "new.json")
    assert "regret of auto" in mpidist(*verify, cwd=tmp_path)


@pytest.fixture
def busy_loops():
    """Keep every core busy."""
    loop = [sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(loop) for _ in range(os.cpu_count() or 1)]
    yield
    for process in loops:
        process.kill()
        process.wait()


@pytest.mark.long
def test_a_busy_machine_is_not_tuned(tmp_path, busy_loops):
    tuned = ("tune", "barrier", "--budget", ENOUGH, "-o", "t.json")
    text = mpidist(*tuned, cwd=tmp_path, status=2)
    assert re.search(r"error: tune: other processes use \d+\.\d of the \d+ cores of ", text), text
    assert "t.json is not written" in text and text.count("by --force") == 1
    assert not (tmp_path / "t.json").exists()
    text = mpidist(*tuned, "--force", cwd=tmp_path)
    assert "written to t.json" in text and "not to be trusted: other processes use " in text
    assert json.loads((tmp_path / "t.json").read_text())["about"]["busy"]
    verify = ("tune", "--verify", "t.json", "--budget", ENOUGH, "--json", "v.json")
    text = mpidist(*verify, cwd=tmp_path)
    assert "not to be trusted: other processes use " in text
    assert json.loads((tmp_path / "v.json").read_text())["header"]["busy"]


BECOMES_BUSY = """
import sys
from mpidist.bench import machine
looks = []
def busy_cores(comm):
    looks.append(comm.rank)
    return [("here", 2, 1.9)] if len(looks) > 1 else []
machine.busy_cores = busy_cores
sys.argv = ["mpidist", *"tune reduce --bytes 8 --budget 60s -o t.json".split()]
from mpidist.cli import main
main()
"""


@pytest.mark.long
@pytest.mark.parametrize("before", [None, "an old table"])
def test_a_machine_that_becomes_busy_leaves_no_table(tmp_path, before):
    """What was written meanwhile is taken back; an old table is what it was."""
    path = tmp_path / "t.json"
    if before:
        mpidist("tune", "barrier", "--budget", ENOUGH, "-o", "t.json", "--force", cwd=tmp_path)
        before = path.read_text()
    (tmp_path / "busy.py").write_text(BECOMES_BUSY)
    text = mpidist("busy.py", cwd=tmp_path, status=2)
    assert "t.json is as it was before" in text and "use 1.9 of the 2 cores of here" in text
    assert (path.read_text() if path.exists() else None) == before


@pytest.mark.long
def test_tune_on_a_narrow_terminal(tmp_path, monkeypatch):
    monkeypatch.setenv("MPIDIST_TERMINAL", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    tuned = ("tune", "reduce_scatter", "--bytes", "8,1K", "--budget", ENOUGH, "--force")
    for how, heads in (
        ("-o", ("collective", "memory", "from this size on")),
        ("--verify", ("floor", "choice")),
    ):
        text = mpidist(*tuned, how, "t.json", ranks=0, cwd=tmp_path)
        assert "…" not in text and all(head in text for head in heads), text
        rows = re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", text)
        assert re.search("^ reduce_scatter +private ", rows, re.MULTILINE), text


@pytest.mark.long
def test_tune_without_a_result_or_table(tmp_path):
    tuned = ("tune", "allreduce", "--bytes", "8", "-o", "t.json", "--force")
    text = mpidist(*tuned, "--budget", "0.000001s", ranks=0, cwd=tmp_path, status=1)
    assert "nothing was measured: t.json was not written" in text
    (tmp_path / "t.json").write_text("{broken")
    text = mpidist(*tuned, ranks=2, cwd=tmp_path, status=2)
    assert "t.json is not JSON" in text and "Traceback" not in text
    assert (tmp_path / "t.json").read_text() == "{broken"


def test_bench_on_a_narrow_terminal(tmp_path, monkeypatch):
    monkeypatch.setenv("MPIDIST_TERMINAL", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    what = ("bench", "allreduce", "--bytes", "1M", "--memory", "both", "--budget", "0.1")
    names = ("--algorithms", "hierarchical_leaders", "--stream")
    text = re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", mpidist(*what, *names, ranks=0))
    rows = [line.split() for line in text.splitlines() if "hierarchical_leaders" in line]
    assert "…" not in text and [row[1] for row in rows] == ["private", "symmetric"], text
    assert all(row[-1] == "yes" for row in rows)


@each_mpi
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(python, closed, tmp_path):
    """A job runs without; what it writes there is nowhere."""
    writes = f"import sys; print(1), print(2, file=sys.stderr), open('{tmp_path}/done', 'w')"
    words = [python, "-m", "mpidist", "run", "-n", "1", "-c", writes]
    assert run(["sh", "-c", f'"$@" {closed}', "sh", *words], LIMIT, plain()).status == 0
    assert (tmp_path / "done").exists()


@each_mpi
@pytest.mark.parametrize("more", [[], ["--label"], ["--full-traceback"]])
def test_output_that_cannot_be_written(python, more, tmp_path):
    """It is said once, and the job goes on to its end, with another exit code than 0."""
    writes = f"for k in range(9): print(k, flush=True)\nopen('{tmp_path}/done', 'w')"
    words = [python, "-m", "mpidist", "run", "-q", "-n", "1", *more, "-c", writes]
    done = run(["sh", "-c", '"$@" >/dev/full', "sh", *words], LIMIT, plain())
    assert done.status == 1 and (tmp_path / "done").exists(), done.output
    assert done.output.count("cannot be written") == 1, done.output
    assert "standard output cannot be written" in done.output and "No space" in done.output


def test_a_table_that_cannot_be_written():
    words = [sys.executable, "-m", "mpidist", "list"]
    done = run(["sh", "-c", '"$@" >/dev/full', "sh", *words], LIMIT, plain())
    assert done.status == 1
    assert done.output == "mpidist: error: output cannot be written: No space left on device\n"


@pytest.mark.long
def test_interrupted_tuner_keeps_its_results(tmp_path):
    """As by Ctrl-C on the terminal: the launcher passes it on to the ranks."""
    path = tmp_path / "t.json"
    start = [sys.executable, "-m", "mpidist", "run", "-n", "2", "--", "mpidist"]
    job = subprocess.Popen(
        [*start, "tune", "allreduce", "--budget", "60s", "--force", "-o", str(path)],
        env=plain(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until = time.monotonic() + LIMIT
        while not path.exists() and time.monotonic() < until:
            time.sleep(0.05)
        os.killpg(job.pid, signal.SIGINT)
        job.wait(LIMIT)
    finally:
        end(job)
    assert TuningTable.load(path).entries

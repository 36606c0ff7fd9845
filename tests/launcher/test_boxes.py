"""A launcher's boxes are held back, nothing else is changed; a shell stands for the launcher."""

import os
import random
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from mpidist.launcher import supervisor
from mpidist.launcher.boxes import Boxes
from mpidist.launcher.mpi import OPEN_MPI, find_library
from mpidist.launcher.notes import Notes
from tests.support.jobs import each_mpi
from tests.support.launcher_kits import KINDS, supervised
from tests.support.processes import environment, run, run_limited

DASHES, DOUBLE = "-" * 74 + "\n", "=" * 83 + "\n"
ABORT = (
    f"{DASHES}MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\n  Errorcode: 3\n\n"
    f"exactly when Open MPI kills them.\n{DASHES}"
)
BOXES = [
    ABORT,
    f"{DASHES}prterun noticed that process rank 1 with PID 7 on node vm exited on\n"
    f"signal 9 (Killed).\n{DASHES}",
    f"{DASHES}mpiexec detected that one or more processes exited with non-zero status, thus "
    f"causing\nthe job to be terminated.\n\n  Exit code:    3\n{DASHES}",
    f"{DASHES}prterun has exited due to process rank 1 with PID 0 on node vm calling\n"
    f'"abort". This may have caused other processes in the application to be\n{DASHES}',
    f"{'-' * 55}\nPrimary job  terminated normally, but 1 process returned\na non-zero exit code. "
    f"Per user-direction, the job has been aborted.\n{'-' * 55}\n",
    f"{DASHES}Primary job  terminated normally, but 1 process returned\na non-zero exit code. "
    f"Per user-direction, the job has been aborted.\n{DASHES}",
    f"\n{DOUBLE}=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   EXIT CODE: 9\n"
    f"=   CLEANING UP REMAINING PROCESSES\n{DOUBLE}",
]
WHOLE = [  # written at once
    "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\n"
    "This typically refers to a problem with your application.\n"
    "Please see the FAQ page for debugging suggestions\n",
    "Abort(3) on node 1 (rank 1 in comm 0): application called MPI_Abort(comm=0x84, 3) - x 1\n",
    "1: Abort(5) on node 1 (rank 1 in comm 0): application called MPI_Abort(comm=0x84, 5) - x 1\n",
]
KEPT = [
    f"{DASHES}There are not enough slots available in the system to satisfy the 9\n{DASHES}",
    f"{DASHES}prterun has exited due to process rank 1 with PID 0 on node vm exiting\n{DASHES}",
    "Abort(671156879) on node 0 (rank 0 in comm 0): Fatal error in internal_Allreduce: Invalid\n",
    f"{DASHES}| a table | of numbers |\n{DASHES}",
    f"-{DASHES}MPI_ABORT, what is it?\n",
    DOUBLE,
    f"{DOUBLE}=   FAILURES\n",
    f"\n{DOUBLE}",
    "\n",
    "10%\r20%\r",
    "----",
    "=",
    "a word",
    "\0\1\2\xff",
]


def copied(parts, told, capfd, pause=0.002):
    """Write the parts as a launcher's standard output; return what comes out."""
    boxes, (output, errors) = Boxes(), (os.pipe(), os.pipe())
    os.close(errors[1])
    pipes = (os.fdopen(pipe[0], "rb", 0) for pipe in (output, errors))
    boxes.copy(SimpleNamespace(**dict(zip(("stdout", "stderr"), pipes))))
    with open(output[1], "wb", buffering=0) as launcher:
        for part in parts:
            launcher.write(part)
            time.sleep(pause)
    boxes.told = told
    boxes.wait()
    boxes.show()
    return capfd.readouterr().out.encode("latin-1")


@pytest.fixture
def capfd(capfdbinary):
    """The captured bytes as text of latin-1."""

    class Text:
        @staticmethod
        def readouterr():
            both = capfdbinary.readouterr()
            return type(both)(*(each.decode("latin-1") for each in both))

    return Text


@pytest.fixture
def without_pauses(monkeypatch):
    """However long a part of a box takes to arrive, it goes on."""
    monkeypatch.setattr("mpidist.launcher.boxes._GOES_ON_WITHIN", 100.0)


@pytest.mark.usefixtures("without_pauses")
@pytest.mark.parametrize("seed", range(12))
def test_only_boxes_are_held_back(capfd, seed):
    """Whatever stands beside them, and wherever the launcher's output is cut into pieces."""
    draw = random.Random(seed)
    texts = [draw.choice(KEPT if draw.random() < 0.6 else BOXES) for _ in range(60)]
    # Dashes directly before a frame make it longer, and a box that follows is not seen.
    texts = [f"{text}|" if text.endswith(("-", "=")) else text for text in texts]
    whole = "".join(texts).encode("latin-1")
    cuts = sorted(draw.sample(range(len(whole)), 40))
    cuts = [cut for cut in cuts if whole[cut - 1 : cut + 1] != b"\n="]  # Hydra writes both at once
    parts = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)])]
    program = "".join(text for text in texts if text not in BOXES).encode("latin-1")
    assert copied(parts, True, capfd) == program
    shown = copied(parts, False, capfd)
    held = "".join(text for text in texts if text in BOXES).encode("latin-1")
    assert shown.startswith(program) and sorted(shown[len(program) :]) == sorted(held)


@pytest.mark.usefixtures("without_pauses")
@pytest.mark.parametrize("line", WHOLE)
def test_what_mpich_writes_at_once(capfd, line):
    assert copied([b"a\n", line.encode(), b"b"], True, capfd, 0.05) == b"a\nb"


def test_a_part_of_a_box_is_not_lost(capfd):
    half = ABORT[:200].encode()
    assert copied([b"a", half], True, capfd) == b"a" + half


@pytest.mark.usefixtures("without_pauses")
@pytest.mark.parametrize(
    ("parts", "shown"),
    [
        ([ABORT, "a", "\0"], "a"),
        ([ABORT, "a\0\0"], "a"),
        ([f"{ABORT}\0{ABORT}\0"], ""),
        ([ABORT, "\0", ABORT, "\0", "\0"], ""),
        ([f"{KEPT[0]}\0"], KEPT[0]),
        ([KEPT[0], "\0", "\0"], KEPT[0]),
        ([f"{KEPT[0]}a\0"], f"{KEPT[0]}a\0"),
        (["a\0"], "a\0"),
    ],
)
def test_the_last_byte_of_prterun(capfd, parts, shown):
    """After each box, also of those that are not held back; when nodes are lost, of several."""
    assert copied([part.encode() for part in parts], True, capfd, 0.05) == shown.encode()


@pytest.mark.parametrize("kind", KINDS)
def test_output_comes_at_once(kind):
    """What has no line's end too, and what may begin a frame after a moment."""
    program = (
        "import os, sys\nfrom tests.support.launcher_kits import Connections, Notes, supervised\n"
        f"sys.exit(supervised(0, {kind.__name__}).run(['cat'], os.environ))"
    )
    words = [sys.executable, "-c", program]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, env=environment(), bufsize=0, **pipes) as job:
        for part in (b"12%\r", b"a word", b"-----", b"-" * 74 + b"\n| x"):
            job.stdin.write(part)
            came = b""
            while len(came) < len(part):
                came += os.read(job.stdout.fileno(), 1000)
            assert came == part
        job.stdin.close()
        assert job.wait(100) == 0


def test_a_reader_that_waits_loses_nothing():
    """It reads a second after the launcher has ended, and more than a pipe holds is under way."""
    program = (
        "import os\nfrom tests.support.launcher_kits import Notes, supervised\n"
        "supervised(0, Notes).run(['head', '-c', '190000', '/dev/zero'], os.environ)"
    )
    words = [sys.executable, "-c", program]
    with subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE) as job:
        time.sleep(3.0)
        assert len(job.stdout.read()) == 190_000


def test_a_process_that_the_launcher_left_is_not_waited_for():
    begun = time.monotonic()
    assert supervised(0, Notes).run(["sh", "-c", "sleep 300 & true"], environment()) == 0
    assert time.monotonic() - begun < 150


def test_a_box_is_shown_if_the_job_goes_on(monkeypatch, capfd, tmp_path):
    """The launcher ends when the box has been shown."""
    monkeypatch.setattr(supervisor, "SHOWN_WITHIN", 0.1)
    shown, ended = tmp_path / "shown", []
    job = supervised(0, Notes)
    show = job._boxes.show

    def watched(*older):
        show(*older)
        ended.append(capfd.readouterr().err)
        if "MPI_ABORT" in "".join(ended):
            shown.touch()

    monkeypatch.setattr(job._boxes, "show", watched)
    (tmp_path / "box").write_text(ABORT)
    waits = f"cat {tmp_path}/box >&2; while [ ! -e {shown} ]; do sleep 0.05; done; exit 3"
    assert job.run(["sh", "-c", waits], environment()) == 3
    assert "".join(ended) == ABORT


ENDS = """import os, signal, sys
import mpidist
from mpidist.communicator import launch
launch.LAUNCHER_ENDS_WITHIN = 20.0  # the other rank says nothing, however late the launcher is
comm = mpidist.init()
os.write(1, b"a rank is here\\n")
comm.barrier()
if comm.rank == 1:
    {}
comm.recv(comm.empty(1), (comm.rank + 1) % 2)
"""
SIGNS = "BAD TERMINATION", "EXIT STRING", "prterun", "MPI_ABORT", "Abort(", "---", "===", "\0"


@pytest.mark.long
@each_mpi
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("raise ValueError('wrong')", "failed first: ValueError: wrong"),
        ("os._exit(3)", "ended with exit code 3"),
        ("sys.exit(3)", "ended with exit code 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by signal 9 (SIGKILL)"),
    ],
    ids=["raise", "_exit", "exit", "kill"],
)
def test_a_failure_is_told_once(python, tmp_path, how, told):
    (tmp_path / "fails.py").write_text(ENDS.format(how))
    words = [python, "-m", "mpidist", "run", "-n", "2"]
    done = run_limited([*words, "fails.py"], 200, environment(), cwd=tmp_path)  # with its NULs
    assert done.status in (1, 3, 137) and done.output.count("a rank is here") == 2, done.output
    assert not [sign for sign in SIGNS if sign in done.output], done.output
    last = done.output.replace("a rank is here\n", "").splitlines()[-1]  # they may come later
    assert last.startswith("mpidist run: rank 1 on ") and last.endswith(told), done.output


@each_mpi
def test_the_boxes_are_shown_on_request(python, tmp_path):
    """And where mpidist has nothing to say: the rank that MPI ended told it nothing."""
    aborts = "from mpi4py import MPI; MPI.COMM_WORLD.Abort(5)"
    how, status, signs = "os.kill(os.getpid(), signal.SIGKILL)", 137, ["BAD TERMINATION"]
    if python == sys.executable and find_library().vendor == OPEN_MPI:
        # A prterun that sees a killed rank's end and its closed socket at once writes no box.
        how, status, signs = aborts, 5, ["MPI_ABORT", "prterun has exited"]
    (tmp_path / "ends.py").write_text(ENDS.format(how))
    words = [python, "-m", "mpidist", "run", "-n", "2"]
    shown = run([*words, "--full-traceback", "ends.py"], 200, environment(), cwd=tmp_path)
    silent = run([*words, "--no-watch", python, "-c", aborts], 200, environment())
    assert any(sign in shown.output for sign in signs), shown
    assert shown.status == status and silent.status == 5
    told = "on rank", "ended with exit code 5", "application called MPI_Abort"
    assert any(text in silent.output for text in told), silent.output


def test_another_program_is_told_of_by_the_launcher():
    """Not monitored, and no Python: mpidist knows the exit code only."""
    box = BOXES[2]
    told = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os, sys\nfrom tests.support.launcher_kits import Notes, supervised\n"
            "sys.exit(supervised(1, Notes).run(sys.argv[1:], os.environ))",
            "sh",
            "-c",
            'printf "%s" "$1" >&2; exit 3',
            "sh",
            box,
        ],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
        timeout=200,
    )
    assert (told.returncode, told.stdout, told.stderr) == (3, "", box)

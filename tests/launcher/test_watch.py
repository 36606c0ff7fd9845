"""``mpidist run`` watches its ranks, on this machine; a shell stands for the launcher."""

import contextlib
import os
import pty
import resource
import signal
import socket
import sys
import threading
import time

import pytest

from mpidist.commands.run import run_command
from mpidist.errors import LaunchError
from mpidist.launcher import job as running
from mpidist.launcher import watch as watching
from mpidist.launcher.connections import UNKNOWN_AT_MOST, RankState, addresses_v6, raise_file_limit
from mpidist.launcher.plain import PlainJob
from mpidist.launcher.watch import JobWatch, Signals
from tests.support import processes
from tests.support.processes import environment, run

RANK = {**environment(), "OMPI_COMM_WORLD_RANK": "0"}


def python(program):
    return [sys.executable, "-c", program]


@pytest.mark.parametrize(
    ("program", "status", "told"),
    [
        ("print('all well')", 0, "0: all well"),
        ("import sys; sys.exit(3)", 3, "ended with exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", 137, "was killed by signal 9 (SIGKILL)"),
    ],
)
def test_the_watch_tells_how_ranks_end(tmp_path, program, status, told):
    (tmp_path / "program.py").write_text(program)
    words = ["-m", "mpidist", "run", "-n", "2", "--label", str(tmp_path / "program.py")]
    done = run([sys.executable, *words], 200, environment())
    assert done.status == status and told in done.output, done.output


def test_the_watch_names_the_log_of_the_rank_that_failed(tmp_path):
    (tmp_path / "program.py").write_text("print('why'); raise SystemExit(3)")
    words = ["-m", "mpidist", "run", "-n", "1", "--log-dir", str(tmp_path)]
    done = run([sys.executable, *words, str(tmp_path / "program.py")], 200, environment())
    (line,) = (line for line in done.output.splitlines() if "ended with exit code 3" in line)
    assert done.status == 3 and line.endswith(f"; its log: {tmp_path}/rank-00000.log")
    assert (tmp_path / "rank-00000.log").read_text() == "why\n"


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.0\r\n\r\n",
        b"7\n",
        b"{}\n",
        b"x" * 100000,
        b"[" * 20_000 + b"\n",
        b"[" * 900 + b"\n",
    ],
)
def test_the_watch_does_not_listen_to_strangers(said, tmp_path):
    """A port scan must not end a job: the one rank ends well after it."""
    watch, visited, shown_the_door = JobWatch(1), tmp_path / "visited", []
    port = watch.connections._listener.getsockname()[1]

    def visit():
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(said)
            stranger.settimeout(100)
            with contextlib.suppress(ConnectionError):
                shown_the_door.append(stranger.recv(1) == b"")
        visited.touch()

    guest = threading.Thread(target=visit)
    guest.start()
    stays = ["sh", "-c", f"while [ ! -e {visited} ]; do sleep 0.05; done"]
    assert watch.run(watch.command(stays), RANK) == 0
    guest.join()
    assert all(shown_the_door)


def test_full_disk_ends_the_log_only(tmp_path):
    """A limit of the file's size stands for the disk."""
    program = "for k in range(3000): print('a line that does not fit', k)"
    watch = JobWatch(1, logs=str(tmp_path))
    limited = [
        "sh",
        "-c",
        'ulimit -f 4; exec "$@" >/dev/null 2>&1',
        "sh",
        *watch.command(python(program)),
    ]
    assert watch.run(limited, RANK) == 0
    assert 0 < (tmp_path / "rank-00000.log").stat().st_size < 30_000


def test_a_log_is_not_written_through_a_link(tmp_path, capfd):
    (tmp_path / "precious").write_text("kept")
    os.symlink("precious", tmp_path / "rank-00000.log")
    watch = JobWatch(1, logs=str(tmp_path))
    assert watch.run(watch.command(["echo", "shown"]), RANK) == 0
    assert (tmp_path / "precious").read_text() == "kept"
    said = capfd.readouterr()
    assert "shown" in said.out and "rank 0 has no log" in said.err


STRANGER = """
import os, socket, sys
if os.getuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
for name in sys.argv[2:]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.sendto(sys.argv[1].encode(), chr(0) + name)
"""
FORGED = [
    '{"status": 0}',
    '{"rank": 0, "host": "x", "exit": 7}',
    '{"rank": 0, "host": "x", "mpi": "starting"}',
    '{"rank": 0, "host": "x", "failure": {"kind": "X", "line": "forged", "text": "forged"}}',
    "[" * 20_000,
]


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, which can become another user")
@pytest.mark.parametrize("monitored", [True, False])
def test_notes_of_another_user_are_not_read(capfd, monitored):
    """Each forged note is sent to the job's socket by a process of another user."""
    mark = "MPIDIST_RUN_NOTES"
    program = (
        "import os, subprocess, sys\n"
        f"for note in {FORGED!r}:\n"
        f"    subprocess.run([sys.executable, '-c', {STRANGER!r}, note, os.environ[{mark!r}]],"
        " check=True)\n"
        "print('FINISHED WELL')\n"
    )
    job = JobWatch(1) if monitored else PlainJob(1)
    words = python(program)
    assert job.run(job.command(words) if isinstance(job, JobWatch) else words, RANK) == 0
    said = capfd.readouterr()
    assert "FINISHED WELL" in said.out and "forged" not in said.err
    states = job.connections.known if isinstance(job, JobWatch) else job._known
    assert all(not state.mpi and not state.left for state in states.values())


def test_a_note_says_only_what_is_the_programs_to_tell():
    """A process of the job's own user cannot announce the end of a rank: its monitor does."""
    tell = (
        "from mpidist.communicator.launcher_notes import send_note\n"
        "assert send_note(status=5) and send_note(failure=7) and send_note(exit='x')\n"
    )
    watch = JobWatch(1)
    assert watch.run(watch.command(python(tell)), RANK) == 0


def test_control_characters_reach_no_terminal(capfd):
    text = "raise SystemError('\\x1b]0;pwned\\x07')"
    tell = (
        "from mpidist.communicator.launcher_notes import send_note\n"
        "send_note(failure={'kind': 'X', 'line': 'a\\x1b]0;b', 'text': 'c\\x1b]0;d'})\n"
    )
    watch = JobWatch(1)
    watch.run(watch.command(python(tell + text)), RANK)
    said = capfd.readouterr().err
    assert "\\x1b]0;d" in said and "failed first: a\\x1b]0;b" in said and "\x1b]0;d" not in said


def visits(watch, visitors, tmp_path):
    """Run a rank that ends when all visitors have gone; return its exit code."""
    gone = tmp_path / "gone"
    guests = [threading.Thread(target=visitor) for visitor in visitors]

    def wait():
        for guest in guests:
            guest.start()
        for guest in guests:
            guest.join()
        gone.touch()

    host = threading.Thread(target=wait)
    host.start()
    stays = ["sh", "-c", f"while [ ! -e {gone} ]; do sleep 0.05; done"]
    code = watch.run(watch.command(stays), RANK)
    host.join()
    return code


def test_strangers_do_not_crowd_out_the_ranks(tmp_path):
    """As many as can connect to the port at once: the oldest are sent away, and the rank stays."""
    watch, sent_away = JobWatch(1), []
    port = watch.connections._listener.getsockname()[1]

    def crowd():
        with contextlib.ExitStack() as stack:
            address = ("127.0.0.1", port)
            all_of_them = [
                stack.enter_context(socket.create_connection(address)) for _ in range(200)
            ]
            for one in all_of_them[: 200 - UNKNOWN_AT_MOST - 1]:
                one.settimeout(100)
                with contextlib.suppress(ConnectionError):
                    sent_away.append(one.recv(1) == b"")

    assert visits(watch, [crowd], tmp_path) == 0
    assert sent_away and all(sent_away)


def test_a_stranger_who_waits_is_sent_away(tmp_path, monkeypatch):
    monkeypatch.setattr("mpidist.launcher.connections.UNKNOWN_SECONDS", 0.3)
    watch = JobWatch(1)
    port = watch.connections._listener.getsockname()[1]

    def wait():
        with socket.create_connection(("127.0.0.1", port), 100) as one:
            one.recv(1)

    assert visits(watch, [wait], tmp_path) == 0


def test_too_many_open_files_end_no_job(tmp_path, monkeypatch):
    """accept() fails; strangers leave, and the job goes on."""
    watch = JobWatch(1)
    port = watch.connections._listener.getsockname()[1]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def crowd():
        time.sleep(2.0)  # until the rank is there
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, hard))
        kept = []
        with contextlib.suppress(OSError):
            while True:
                kept.append(socket.create_connection(("127.0.0.1", port), 1))
        time.sleep(0.5)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for one in kept:
            one.close()

    assert visits(watch, [crowd], tmp_path) == 0


def test_a_job_of_this_machine_listens_here_only():
    local, elsewhere = JobWatch(1, local=True), JobWatch(1)
    assert local.connections._listener.getsockname()[0] == "127.0.0.1"
    assert local.connections.address.startswith("127.0.0.1/")
    assert elsewhere.connections._listener.getsockname()[0] in ("::", "0.0.0.0")
    for watch in (local, elsewhere):
        watch.connections.close()


@pytest.mark.parametrize(
    ("environ", "elsewhere"),
    [({}, False), ({"PBS_NODEFILE": "f"}, True), ({"PRTE_MCA_prte_default_hostfile": "f"}, True)],
)
def test_ranks_may_be_elsewhere(environ, elsewhere):
    assert running.may_be_elsewhere(environ) is elsewhere


LATE = """
import signal, sys, threading, time
came = threading.Event()
time.sleep(0.4)  # as long as it takes to import what one needs
signal.signal(signal.SIGUSR1, lambda *_: came.set())
sys.exit(0 if came.wait(100) else 1)
"""


def test_early_signal(tmp_path):
    """It was sent before the rank was there, and waits until the program has a handler.

    The shell around the program has none, and is not ended by it.
    """
    watch, program = JobWatch(1), tmp_path / "late.py"
    program.write_text(LATE)
    watch.connections.send(signal.SIGUSR1)
    shell = ["sh", "-c", f"{sys.executable} {program}; exit $?"]
    assert watch.run(watch.command(shell), RANK) == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("left", "last", "does", "codes"),
    [
        (
            "sleep 600",
            "wait",
            "while [ ! -e {} ]; do sleep 0.05; done; kill -9 $!; wait $!",
            (1, 137),
        ),
        ("sh -c 'trap : TERM; sleep 600; sleep 600'", "exit 0", "wait $!", (0,)),
    ],
    ids=["killed", "well"],
)
def test_children_of_a_shell_are_ended(tmp_path, monkeypatch, left, last, does, codes):
    """The process beside the rank is killed, or the shell ends: with it all of the rank.

    What it leaves behind holds its output, and does not hear SIGTERM.
    """
    number = tmp_path / "number"
    program = f"{left} & echo $! > {number}.part; mv {number}.part {number}; {last}"
    watch, begun = JobWatch(1, label=True), time.monotonic()
    words = watch.command(["sh", "-c", program])
    assert watch.run(["sh", "-c", f'"$@" & {does.format(number)}', "sh", *words], RANK) in codes
    assert time.monotonic() - begun < 200
    until = time.monotonic() + 60
    while processes.stat(int(number.read_text()))[:1] not in ([], ["Z"]):
        assert time.monotonic() < until, "the child of the shell is still there"
        time.sleep(0.02)


COUNT = """
import signal, sys, time
count = 0
def more(*_):
    global count
    count += 1
signal.signal(signal.SIGINT, more)
print("ready", flush=True)
until = time.monotonic() + 100.0
while not count and time.monotonic() < until:
    time.sleep(0.05)
time.sleep(0.5)  # for a second one
print(f"heard {count}", flush=True)
"""
WATCHED = """
import os, sys
from mpidist.launcher.watch import JobWatch
from mpidist.launcher.plain import PlainJob
{}(0).run(sys.argv[1:], os.environ)
"""


@pytest.mark.parametrize("job", ["JobWatch", "PlainJob"])
def test_control_c_reaches_the_launcher_once(job):
    """A terminal sends it to both; srun and mpirun take a second one for impatience."""
    number, screen = pty.fork()
    if not number:
        os.execve(sys.executable, [*python(WATCHED.format(job)), *python(COUNT)], environment())
    text = b""
    with contextlib.suppress(OSError):  # EIO at the end
        while part := os.read(screen, 1000):
            text += part
            if b"ready" in part:
                os.write(screen, b"\x03")
    os.waitpid(number, 0)
    os.close(screen)
    assert b"heard 1" in text, text


@pytest.mark.parametrize("kind", [JobWatch, PlainJob])
def test_signal_is_passed_on(kind):
    """Not of a terminal: the launcher has not got it, and is sent it."""
    watch = kind(0)
    assert watch.run(["sh", "-c", "kill -TERM $PPID; exec sleep 600"], environment()) == 143


def test_a_launcher_that_does_not_end(monkeypatch, capfd):
    """All ranks finished well, so this is no failure; but nobody waits for it for ever."""
    monkeypatch.setattr(watching, "ENDS_WITHIN", 0.2)
    watch = JobWatch(1)
    words = watch.command(["true"])
    assert watch.run(["sh", "-c", '"$@"; exec sleep 600', "sh", *words], RANK) == 0
    assert "all ranks succeeded 0.2 s ago: ending the launcher" in capfd.readouterr().err


def test_before_slurm_kills_all(monkeypatch):
    """After SIGTERM the steps to the end fit into the time that is left."""
    deaf = ["sh", "-c", "trap '' TERM; kill -TERM $PPID; sleep 600 & wait; sleep 600"]
    seconds = []
    for _ in range(4):  # on a loaded machine, one of them is in time
        begun = time.monotonic()
        assert JobWatch(0, kill_wait=2.0).run(deaf, environment()) == 137
        seconds.append(time.monotonic() - begun)
        if seconds[-1] < 10:
            break
    assert min(seconds) < 10, seconds  # 8 s and three steps of 3 s otherwise


INIT = """
import sys, time
from mpidist.communicator.launcher_notes import send_note
if sys.argv[1] != "early":
    send_note(mpi="starting")
if sys.argv[1] == "through":
    send_note(mpi="started")
    time.sleep(0.5)
elif sys.argv[1] == "hangs":
    time.sleep(600)
sys.exit(sys.argv[1] != "through")
"""


@pytest.mark.parametrize(
    ("ranks", "how", "status", "never", "told"),
    [
        (1, "hangs", 1, True, "1 of 1 ranks (0) have been in MPI_Init for 0.2 s (--start-timeout)"),
        (1, "aborts", 1, True, "rank 0 on "),
        (1, "early", 1, False, "rank 0 on "),
        (1, "through", 0, False, ""),
        (2, "through", 1, False, "of 2 ranks 1 did not report"),  # it never came
    ],
)
def test_mpi_that_does_not_start(monkeypatch, capfd, ranks, how, status, never, told):
    """As MPICH under SLURM's pmi2, now and then; a rank that is late is waited for."""
    monkeypatch.setattr(watching, "LAST_REPORTS", 0.5)
    watch = JobWatch(ranks, start_timeout=0.2 if how == "hangs" else 100.0)
    words = watch.command([sys.executable, "-c", INIT, how])
    assert watch.run(words, RANK) == status
    assert watch.never_started == never and told in capfd.readouterr().err


def test_a_rank_that_ended_before_mpi(capfd):
    """It will not enter MPI_Init any more: the others are not waited for."""
    watch = JobWatch(2, start_timeout=0.5)
    words = watch.command(python(INIT)[:1])
    one = """export OMPI_COMM_WORLD_RANK=0; "$@" -c "$INIT" hangs &
    OMPI_COMM_WORLD_RANK=1 "$@" -c pass; wait; exit 1"""
    assert watch.run(["sh", "-c", one, "sh", *words], environment(INIT=INIT)) == 1
    said = capfd.readouterr().err
    assert "rank 1 on " in said and "ended with exit code 0 before MPI_Init" in said, said
    assert "1 of 2 ranks (0) have been in MPI_Init" in said and not watch.never_started


LEAVES = """
import os, sys, time
from mpidist.communicator.launcher_notes import send_note
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    assert send_note(exit=3)
    time.sleep(1.0)  # for the monitor to pass it on
    open(sys.argv[1], "w").close()
time.sleep(600)
"""


def test_a_rank_that_said_its_exit_code_is_not_lost(tmp_path, capfd):
    """As in MPICH's MPI_Abort: the launcher kills all ranks with their monitors, in any order."""
    watch = JobWatch(2)
    words = watch.command([*python(LEAVES), f"{tmp_path}/left"])
    kills = f"""export OMPI_COMM_WORLD_RANK=0; "$@" & first=$!
    export OMPI_COMM_WORLD_RANK=1; "$@" & second=$!
    while [ ! -e {tmp_path}/left ]; do sleep 0.05; done
    kill -9 $first; sleep 0.5; kill -9 $second; exit 7"""
    assert watch.run(["sh", "-c", kills, "sh", *words], environment()) == 3
    said = capfd.readouterr().err
    assert "rank 1 on " in said and "ended with exit code 3" in said and "lost" not in said, said


def test_real_time_signals_have_no_name():
    assert str(RankState(3, "n2", -40)) == "rank 3 on n2 was killed by signal 40"


def test_more_ranks_than_files():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pytest.raises(LaunchError, match=r"the limit is \d+ \(ulimit -Hn\); .*--no-watch"):
        raise_file_limit(limits[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, limits[1]))
    try:
        raise_file_limit(200)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 456
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_addresses_beyond_the_link(tmp_path):
    table = tmp_path / "if_inet6"
    table.write_text(
        "00000000000000000000000000000001 01 80 10 80       lo\n"
        "fe8000000000000002163efffe000001 02 40 20 80     eth0\n"
        "20010db8000000000000000000000007 02 40 00 80     eth0\n"
    )
    assert addresses_v6(table) == ["2001:db8::7"]


def test_token_is_not_in_the_command():
    watch = JobWatch(1)
    assert watch.connections.secret not in " ".join(watch.command(["true"]))
    assert (
        watch.run(
            watch.command(python("import os; assert 'MPIDIST_RUN_SECRET' not in os.environ")), RANK
        )
        == 0
    )


@pytest.mark.parametrize(
    ("options", "begun", "lines"),
    [([], False, ["--mpi=pmi2", "mpiexec"]), ([], True, ["--mpi=pmi2"])]
    + [(["--launcher", "srun"], False, ["--mpi=pmi2"])],
)
def test_once_more_without_pmi2(monkeypatch, options, begun, lines):
    """Only where no rank came through MPI_Init, and nobody asked for srun by name."""
    started = []

    def make_launch(library, allocation, options):
        chosen = ["mpiexec"] if options.launcher == "mpiexec" else ["srun", "--mpi=pmi2"]
        return running.Launch(2, chosen, {}, True)

    def start(launch, arguments, watching):
        started.append(launch.launcher[-1])
        return (0, True) if launch.launcher == ["mpiexec"] else (1, begun)

    monkeypatch.setattr(running, "make_launch", make_launch)
    monkeypatch.setattr(running, "start", start)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "2(x2)")
    status = run_command.main([*options, "true"], standalone_mode=False)
    assert started == lines and status == (lines[-1] != "mpiexec")


@pytest.mark.parametrize(("label", "logs", "drawn"), [(0, None, 1), (1, None, 0), (0, "x", 0)])
def test_no_bars_are_drawn_through_a_pipe(monkeypatch, label, logs, drawn):
    """With --label and --log-dir lines are carried, not what a bar writes."""
    seen = []

    class Guard:
        never_started = False

        def __init__(self, *_, **__):
            pass

        def command(self, program):
            return program

        def run(self, command, environ):
            seen.append(int(environ["MPIDIST_TERMINAL"]) > 0)
            return 0

    monkeypatch.setattr(running, "JobWatch", Guard)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    launch = running.Launch(1, ["mpiexec"], {}, False)
    watching = running.WatchOptions(bool(label), logs, Signals())
    assert running.start(launch, ["true"], watching) == (0, True)
    assert seen == [bool(drawn)]

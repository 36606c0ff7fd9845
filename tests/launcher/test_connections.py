"""Reports of monitors over TCP: from ranks of this job, and of nobody else."""

import contextlib
import os
import resource
import socket
import threading
import time

import pytest

from mpidist.errors import LaunchError
from mpidist.launcher.connections import (
    UNKNOWN_AT_MOST,
    Connections,
    addresses_v6,
    raise_file_limit,
)
from mpidist.launcher.supervisor import Supervisor
from tests.support.launcher_kits import (
    monitored,
    python,
    supervised,
)


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
def test_stranger_is_not_listened_to(said, tmp_path):
    """A port scan must not end a job: the one rank ends well after it."""
    watch, visited, shown_the_door = supervised(1), tmp_path / "visited", []
    port = int(watch.reports.address.rpartition("/")[2])

    def visit():
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.settimeout(100)
            with contextlib.suppress(ConnectionError):
                stranger.sendall(said)
                shown_the_door.append(stranger.recv(1) == b"")
        visited.touch()

    guest = threading.Thread(target=visit)
    guest.start()
    stays = ["sh", "-c", f"while [ ! -e {visited} ]; do sleep 0.05; done"]
    assert monitored(watch, *stays) == 0
    guest.join()
    assert all(shown_the_door)


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
    code = monitored(watch, *stays)
    host.join()
    return code


def test_strangers_are_sent_away_for_ranks(tmp_path):
    """As many as can connect to the port at once: the oldest are sent away, and the rank stays."""
    watch, sent_away = supervised(1), []
    port = int(watch.reports.address.rpartition("/")[2])

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


def test_stranger_who_waits_is_sent_away(tmp_path, monkeypatch):
    monkeypatch.setattr("mpidist.launcher.connections.UNKNOWN_SECONDS", 0.3)
    watch = supervised(1)
    port = int(watch.reports.address.rpartition("/")[2])

    def wait():
        with socket.create_connection(("127.0.0.1", port), 100) as one:
            one.recv(1)

    assert visits(watch, [wait], tmp_path) == 0


def test_too_many_open_files_end_no_job(tmp_path, monkeypatch):
    """accept() fails; strangers leave, and the job goes on."""
    watch = supervised(1)
    port = int(watch.reports.address.rpartition("/")[2])
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


def test_local_listens_here_only():
    local, elsewhere = Supervisor(Connections(1, local=True)), supervised(1)
    assert local.reports._listener.getsockname()[0] == "127.0.0.1"
    assert local.reports.address.startswith("127.0.0.1/")
    assert elsewhere.reports._listener.getsockname()[0] in ("::", "0.0.0.0")
    for watch in (local, elsewhere):
        watch.reports.close()


def test_raise_file_limit():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pytest.raises(LaunchError, match=r"the limit is \d+ \(ulimit -Hn\); .*--no-watch"):
        raise_file_limit(limits[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, limits[1]))
    try:
        raise_file_limit(200)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 456
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_addresses_v6_beyond_the_link(tmp_path):
    table = tmp_path / "if_inet6"
    table.write_text(
        "00000000000000000000000000000001 01 80 10 80       lo\n"
        "fe8000000000000002163efffe000001 02 40 20 80     eth0\n"
        "20010db8000000000000000000000007 02 40 00 80     eth0\n"
    )
    assert addresses_v6(table) == ["2001:db8::7"]


def test_secret_is_not_in_the_command():
    watch = supervised(1)
    assert watch.reports.secret not in " ".join(watch.reports.command(["true"]))
    absent = "import os; assert 'MPIDIST_RUN_SECRET' not in os.environ"
    assert monitored(watch, *python(absent)) == 0

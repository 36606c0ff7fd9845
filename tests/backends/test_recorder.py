"""The recorder: whose its files are, when they go, and that it is always in the file."""

import gc
import os
import re
import stat
import subprocess
import sys
import time

import pytest

from mpidist.backends import flight, recorder
from mpidist.backends.flight import ENDED_WELL, FAILED, HEADER, RUNNING
from mpidist.backends.recorder import Recorder, own_folder, prune
from mpidist.errors import ConfigError


@pytest.fixture
def job(tmp_path):
    return tmp_path / "flights" / "job"


def ranks(job, size):
    made = [Recorder(job, rank, size) for rank in range(size)]
    for each in made:
        each.words[HEADER["here"]] = size
    return made


def test_files_are_this_users_alone(job):
    made = Recorder(job, 0, 1)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (job.parent, job, made.path)]
    assert modes == [0o700, 0o700, 0o600]
    assert made.path.stat().st_blocks * 512 >= flight.NBYTES  # reserved: no SIGBUS later


def test_clocks_are_read_together_though_most_readings_are_held_up(monkeypatch):
    held_up, now = iter([7_000, 0, 2, 9_000, 0, 0, 5, 0, 0, 0]), [100]

    def read():
        now[0] += 1
        return now[0]

    def read_wall():
        now[0] += next(held_up)
        wall = 10**18 + read()
        now[0] += next(held_up)
        return wall

    monkeypatch.setattr(recorder, "monotonic_ns", read)
    monkeypatch.setattr(time, "time_ns", read_wall)
    wall, clock = recorder.both_clocks()
    assert wall - clock == 10**18 and not list(held_up)


def test_folder_that_others_may_write_to_is_refused(job):
    job.parent.mkdir()
    job.parent.chmod(0o777)
    with pytest.raises(PermissionError, match="others may write into"):
        Recorder(job, 0, 1)


def test_folder_that_is_a_link_is_refused(job, tmp_path):
    job.parent.symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="is not a folder of this user"):
        own_folder(job.parent)


def test_no_room_is_told(job, monkeypatch):
    def full(handle, at, nbytes):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        Recorder(job, 0, 1)
    assert not list(job.iterdir())


def test_start_without_room_goes_on(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MPIDIST_FLIGHT", str(tmp_path / "file"))
    monkeypatch.setattr(recorder, "_recorder", None)
    assert recorder.start("job", 3, 4) is None and recorder.current() is None
    assert "rank 3 has no flight record" in caplog.text


def test_start_without_a_folder_for_temporary_files_goes_on(monkeypatch, caplog):
    def none():
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.delenv("MPIDIST_FLIGHT", raising=False)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # /dev/shm
    monkeypatch.setattr("tempfile.gettempdir", none)
    monkeypatch.setattr(recorder, "_recorder", None)
    assert recorder.start("job", 3, 4) is None
    assert "rank 3 has no flight record: [Errno 2] No usable temporary" in caplog.text


def test_given_folder_is_created_or_refused(tmp_path, monkeypatch):
    def given(path):
        recorder.check_folder({"MPIDIST_FLIGHT": str(path)})
        return path

    assert stat.S_IMODE(given(tmp_path / "a b" / "c").stat().st_mode) == 0o700
    given(tmp_path / "a b" / "c")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"MPIDIST_FLIGHT='.*/file': expected a folder of this"):
        given(tmp_path / "file")
    with pytest.raises(ConfigError, match="expected a folder"):
        given(tmp_path / "file" / "below")
    (tmp_path / "a b" / "c").chmod(0o775)
    with pytest.raises(ConfigError, match="others may write into"):
        given(tmp_path / "a b" / "c")
    recorder.check_folder({})


def test_start_while_the_folder_of_all_jobs_is_removed(tmp_path, monkeypatch):
    """The last of other jobs removes it, between its creation and that of the job's folder."""
    made, real = [], own_folder

    def removed(path):
        made.append(real(path))
        if len(made) in (1, 2, 3):
            path.rmdir()
        return made[-1]

    monkeypatch.setattr(recorder, "own_folder", removed)
    assert Recorder(tmp_path / "flights" / "job", 0, 1).path.exists() and len(made) == 5


def test_the_last_to_end_well_removes_the_records(job):
    first, second = ranks(job, 2)
    first.end(ENDED_WELL)
    assert flight.read(first.path).state == ENDED_WELL
    second.end(ENDED_WELL)
    assert not job.parent.exists()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_records_stay_after_a_failure(job, order):
    made = ranks(job, 2)
    made[0].end(FAILED)
    for rank in order:
        made[rank].end(ENDED_WELL)
    assert [flight.read(each.path).state for each in made] == [FAILED, ENDED_WELL]


def test_records_stay_while_a_rank_runs(job):
    first, _ = ranks(job, 2)
    first.end(ENDED_WELL)
    assert len(list(job.iterdir())) == 2


def test_a_forked_child_ends_nothing(job):
    (made,) = ranks(job, 1)
    child = os.fork()
    if not child:
        made.end(ENDED_WELL)
        os._exit(0)
    os.waitpid(child, 0)
    assert flight.read(made.path).state == RUNNING


def test_communicators(job):
    made = Recorder(job, 1, 4)
    tracks = [made.track([0, 1], 1) for _ in range(flight.TRACKS)]
    assert made.track([0, 1], 1) is None
    seen = flight.read(made.path)
    assert seen.unrecorded == 1 and len(seen.tracks) == flight.TRACKS
    assert len({track.key for track in seen.tracks}) == flight.TRACKS  # of equal members
    del tracks
    gc.collect()
    again = made.track(range(1000), 1)
    seen = next(t for t in flight.read(made.path).tracks if t.serial == again.serial)
    assert seen.size == 1000 and seen.begun == 0


def test_equal_communicators_have_equal_keys_on_their_ranks(job):
    made = ranks(job, 2)
    for each in made:
        each.tracks = [each.track(members, 0) for members in ([0, 1], [1, 0], [0, 1])]
    keys = [[track.key for track in flight.read(each.path).tracks] for each in made]
    assert keys[0] == keys[1] and len(set(keys[0])) == 3


def test_wait(job):
    made = Recorder(job, 0, 1)
    track = made.track([0], 0)
    track.begin(5, 3)
    track.wait("/a/train.py:41")
    (seen,) = flight.read(made.path).tracks
    assert seen.site == "/a/train.py:41" and seen.since <= time.monotonic_ns()
    track.wait("/a/train.py:41")  # goes on after a look around
    assert flight.read(made.path).tracks[0].since == seen.since
    track.wait("/" + "long/" * 40 + "train.py:42")
    (longer,) = flight.read(made.path).tracks
    assert longer.site.startswith("…") and longer.site.endswith("/long/train.py:42")
    assert longer.since > seen.since
    track.go_on()
    assert flight.read(made.path).tracks[0].site == ""
    track.wait("/пути/" * 20 + "\udcff/train.py:43")  # bytes count, and not all are of UTF-8
    track.wait("/пути/" * 20 + "\udcff/train.py:43")
    (odd,) = flight.read(made.path).tracks
    assert re.fullmatch(r"…[^…]*/(пути//)+пути/\?/train.py:43", odd.site)
    track.go_on()
    track.wait("/a/train.py:41")
    track.begin(6, 3)
    assert flight.read(made.path).tracks[0].site == ""  # of the operation before


def test_wait_for_a_message(job):
    made = Recorder(job, 0, 1)
    track = made.track([0], 0)
    track.awaited = "recv from rank {}".format, 3
    track.wait("/a/train.py:41")
    assert flight.read(made.path).tracks[0].awaited == "recv from rank 3"
    track.go_on()
    assert flight.read(made.path).tracks[0].awaited == ""
    track.awaited = int, "x"  # it raises
    track.wait("/a/train.py:41")
    (seen,) = flight.read(made.path).tracks
    assert (seen.site, seen.awaited) == ("/a/train.py:41", "")
    track.awaited = None
    track.wait("/a/train.py:42")
    (seen,) = flight.read(made.path).tracks
    assert (seen.site, seen.awaited) == ("/a/train.py:42", "")


def test_a_description_is_stored_once(job):
    made = Recorder(job, 0, 1)
    for _ in range(3):
        made.describe(flight.fingerprint_of("barrier", True), "barrier")
    assert made.words[HEADER["texts"]] == 1
    for k in range(flight.TEXTS):
        made.describe(flight.fingerprint_of(f"{k}", True), f"{k}")
    made.describe(flight.fingerprint_of("barrier", True), "barrier")  # it has been replaced
    assert made.words[HEADER["texts"]] == flight.TEXTS + 2


def dead(jobs, name, age, records=1):
    """The records of a job whose process is gone."""
    for rank in range(records):
        code = (
            "import sys; from pathlib import Path; from mpidist.backends.recorder import Recorder"
        )
        code += "; import os; Recorder(Path(sys.argv[1]), int(sys.argv[2]), 1); os._exit(1)"
        command = [sys.executable, "-c", code, str(jobs / name), str(rank)]
        subprocess.run(command, check=False, timeout=60)
    os.utime(jobs / name, (time.time() - age, time.time() - age))


def test_prune_keeps_the_newest_and_those_that_run(tmp_path):
    jobs = tmp_path / "flights"
    for k in range(4):
        dead(jobs, f"dead{k}", age=100 - k)
    running = Recorder(jobs / "running", 0, 1)
    os.utime(jobs / "running", (1, 1))
    (jobs / "others").mkdir()
    prune(jobs, most=2)
    assert sorted(path.name for path in jobs.iterdir()) == ["dead2", "dead3", "others", "running"]
    assert running.path.exists()
    prune(jobs, most=2, most_bytes=flight.NBYTES - 1)  # the newest stays, whatever its size
    assert sorted(path.name for path in jobs.iterdir()) == ["dead3", "others", "running"]


def test_prune_removes_records_only(tmp_path):
    """No log of a rank, no file that somebody has put beside a record, and no job elsewhere."""
    jobs = tmp_path / "flights"
    dead(jobs, "dead", age=100)
    (jobs / "dead" / "notes.txt").write_text("")
    (jobs / "logs").mkdir()
    (jobs / "logs" / "rank-00000.log").write_text("mine")
    other = Recorder(jobs / "other", 0, 1)
    other.words[HEADER["pid"]] = 0  # no process here
    other.memory[flight.HOST_AT : flight.HOST_AT + 8] = b"another\0"
    prune(jobs, most=0)
    files = sorted(path.name for path in jobs.glob("*/*"))
    assert files == sorted(["notes.txt", "rank-00000.log", other.path.name])
    assert [flight.read(other.path).alive, flight.read(other.path).crashed] == [False, False]
    other.words[HEADER["state"]] = FAILED
    prune(jobs, most=0)
    assert not other.job.exists()


def test_a_new_job_prunes(tmp_path, monkeypatch):
    dead(tmp_path / "flights", "dead", age=9)
    monkeypatch.setattr(recorder.prune, "__defaults__", (0, 0))
    Recorder(tmp_path / "flights" / "new", 0, 1)
    assert [path.name for path in (tmp_path / "flights").iterdir()] == ["new"]


def test_phases_are_in_their_order_behind_other_operations(tmp_path):
    recorder = Recorder(tmp_path / "jobs" / "job", 0, 1)
    for number in range(20):
        recorder.phase("md.elastic", f"phase {number}")
    names = [each.text for each in flight.read(recorder.path).operations]
    assert names == [f"phase {number}" for number in range(20)]

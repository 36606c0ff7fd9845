"""What is installed and launched for other MPIs, and how the outcomes are told."""

import re
from pathlib import Path

import pytest

from tests import mpis
from tests.support.environments import for_each

MAKEFILE = Path(__file__).resolve().parents[2] / "Makefile"


@pytest.mark.parametrize(
    ("outcomes", "code"), [([True, None], 0), ([True, False], 1), ([None], 1), ([], 1)]
)
def test_every_outcome_is_told_in_the_end(outcomes, code, capfd):
    names = [f"n{number}" for number in range(len(outcomes))]
    told = dict(zip(names, outcomes, strict=True))
    assert for_each("MPI", names, lambda name: (told[name], "totals")) == code
    lines = [f"MPI {name}: totals{' FAILED' * (told[name] is False)}" for name in names]
    assert capfd.readouterr().out.splitlines()[-len(lines) or None :] == (lines or [""])


@pytest.fixture
def done(monkeypatch):
    """What was made and launched, without doing it."""
    calls = []
    monkeypatch.setattr(mpis, "install", lambda name, venv: {"NAME": name})
    monkeypatch.setattr(mpis, "make", lambda *stamps, **given: calls.append(given) or True)

    def launch(python, words, results, **env):
        calls.append((words, results, env))
        return True, "1 passed"

    monkeypatch.setattr(mpis, "launch", launch)
    release = {"VERSION_CODENAME": "bookworm"}
    monkeypatch.setattr(mpis.platform, "freedesktop_os_release", lambda: release)
    monkeypatch.setattr(mpis.shutil, "which", lambda name: name)
    return calls, release


@pytest.mark.parametrize("name", ["debian-mpich", "impi-rt==2021.18.1", "mpich==4.2.3"])
def test_what_is_usual(done, name):
    whole = not name.startswith("mpich")
    assert mpis.test(name, [], True) == (True, "1 passed; 1 passed")
    made, (mpi, results, env), (failures, others, _) = done[0]
    assert made["MPI"] == "" and made["TORCH"] == ("cpu" if whole else "none")
    assert mpi[0] == "mpi-2" and (len(mpi) == 1) == whole and failures[0] == "serial"
    assert env == {"NAME": name} and results != others and "=" not in made["VENV"] + results


def test_what_is_asked_for(done):
    assert mpis.main("mpich==4.2.3 impi-rt", "--no-torch", "mpi-3", "--path", "tests/calls") == 0
    assert [call["TORCH"] for call in done[0][::3]] == ["none", "none"]
    assert [call[0] for call in done[0][1::3]] == [["mpi-3", "--path", "tests/calls"]] * 2
    assert [call[0] for call in done[0][2::3]] == [mpis.FAILURES] * 2


def test_packages_of_debian_are_left_out_elsewhere(done, capfd):
    done[1]["VERSION_CODENAME"] = "trixie"
    assert mpis.main("debian-openmpi impi-rt") == 0
    last = capfd.readouterr().out.splitlines()[-2:]
    assert last[0].startswith("MPI debian-openmpi: left out: ") and "passed" in last[1]
    assert mpis.main("debian-openmpi") == 1  # nothing was tested


def test_the_makefile_names_those_of_debian():
    given = re.search(r"^MPIS \?= (.*)$", MAKEFILE.read_text(encoding="utf-8"), re.MULTILINE)[1]
    assert {name for name in given.split() if "==" not in name} == set(mpis.DEBIAN)

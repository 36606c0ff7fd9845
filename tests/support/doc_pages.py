"""Reads the documentation as a user does: writes down its files and types in its commands."""

from __future__ import annotations

import fnmatch
import re
import shlex
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.processes import Finished, environment, run

ROOT = Path(__file__).resolve().parents[2]
_RST = re.compile(
    r"^\.\. (?:code-block:: (?P<language>\w+)|literalinclude:: (?P<path>\S+))\n"
    r"(?P<options>(?:   :.*\n)*)(?P<body>(?:\n|   .*\n)*)",
    re.MULTILINE,
)
_MARKDOWN = re.compile(
    r"^(?:`(?P<path>[\w/.]+)`:\n\n)?```(?P<language>\w+)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")
# Commands of another machine, or of a fresh one: `make demo` and `make test` have their own tests.
NOT_RUN = ("pip", "srun", "make")


@dataclass
class Command:
    """One line after a ``$``, what the page shows as its output, and what the user is told."""

    line: str
    output: list[str] = field(default_factory=list)

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line, comments=True)

    @property
    def fails(self) -> bool:
        """Whether the page says that it ends with another exit code than 0."""
        return "exit code other than 0" in self.line

    def perform(self, folder: Path, limit: float) -> Finished:
        """Run it in `folder`."""
        words, more = self.words, {}
        while _ASSIGNMENT.fullmatch(words[0]):
            name, _, more[name] = words.pop(0).partition("=")
        # Buffered: what a rank prints comes in one piece, not mixed with what others print.
        env = environment(PYTHONPATH=str(ROOT), **{"PYTHONUNBUFFERED": "", **more})
        return run(["sh", "-c", shlex.join(translate(words)) + " 2>err"], limit, env, folder)

    def differs(self, printed: str) -> str:
        """Say how the output differs from the page's, or nothing; ``…`` stands for anything.

        Lines of different ranks come in any order.
        """
        shown = sorted(line for line in self.output if line.strip() != "…")
        got = [line.rstrip() for line in printed.replace("\0", "").splitlines()]
        got = sorted(line.replace("\r", "") for line in got if line)
        left = list(got)
        for line in shown:
            pattern = re.sub(r"([\[\]?*])", r"[\1]", line.rstrip()).replace("…", "*")
            match = next((g for g in left if fnmatch.fnmatchcase(g, pattern)), None)
            if match is None:
                return f"{line!r} is not in the output:\n{printed}"
            left.remove(match)
        if left and len(shown) == len(self.output):
            return f"the page does not show {left}"
        return ""


def translate(words: list[str]) -> list[str]:
    """Give the command with the programs that belong to this Python."""
    beside = str(Path(sys.executable).parent)
    if words[0] == "mpidist":
        return [sys.executable, "-m", *words]
    if words[0] in ("mpirun", "mpiexec"):
        return [f"{beside}/mpiexec", *words[1:3], *translate(words[3:])]
    return [sys.executable, *words[1:]] if words[0] == "python" else words


def files_and_commands(page: Path) -> tuple[dict[str, str], list[Command]]:
    """Give the files that a page shows, by name, and the commands in their order.

    In a .rst the caption of a Python block is its file; blocks with one caption follow each other.
    A Python block without a file is cut from the examples.
    """
    text = page.read_text(encoding="utf-8")
    files: dict[str, str] = {}
    commands: list[Command] = []
    for block in (_MARKDOWN if page.suffix == ".md" else _RST).finditer(text):
        parts = block.groupdict()
        body = textwrap.dedent(parts["body"]).strip("\n") + "\n"
        caption = re.search(r":caption: (\S+)", parts.get("options") or "")
        name = parts["path"] if page.suffix == ".md" else caption and caption[1]
        if parts["language"] == "console":
            commands += read_commands(body)
        elif page.suffix == ".rst" and parts["path"]:
            files[str(name)] = (page.parent / parts["path"]).read_text(encoding="utf-8")
        elif parts["language"] == "python":
            if name:
                files[name] = files.get(name, "") + body
            else:
                foreign = not_of_an_example(body)
                assert not foreign, f"{page.name}: without a file, and in no example: {foreign}"
    return files, commands


def not_of_an_example(body: str) -> list[str]:
    """Give the lines of a block that stand in no script of examples/, each of which is run."""
    scripts = [path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py")]
    known = {line.strip() for script in scripts for line in script.splitlines()}
    return [line for line in body.splitlines() if line.strip() not in known | {""}]


def read_commands(body: str) -> list[Command]:
    """Give the commands of a console block with their outputs; empty lines count for nothing."""
    commands: list[Command] = []
    for line in body.splitlines():
        if line.startswith("$ "):
            commands.append(Command(line[2:]))
        elif line.strip():
            commands[-1].output.append(line)
    return commands

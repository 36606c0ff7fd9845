"""README.md, docs/ and examples/: every script and command in them does what they say."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import click
import pytest

import mpidist
from mpidist.pipeline.schedules import schedules
from mpidist.schedule import COLLECTIVES
from mpidist.selection.config import ENVIRONMENT_PREFIX, FIELDS
from tests.support.processes import Finished, environment, mpiexec, run
from tests.support.training_kits import NEEDS_TORCH, torch

ROOT = Path(__file__).resolve().parents[2]
# Of tests/pages.py: a Python with mpidist, and nothing else than what the page tells to install.
ALONE = os.environ.get("PAGES_PYTHON", "")
PYTHON = ALONE or sys.executable
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
    def runs_an_example(self) -> bool:
        """Whether it is a script of examples/, whose results are checked."""
        return " examples/" in self.line

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
        path = {} if ALONE else {"PYTHONPATH": str(ROOT)}
        env = environment(**path, **{"PYTHONUNBUFFERED": "", **more})
        return run(["sh", "-c", shlex.join(translate(words)) + " 2>err"], limit, env, folder)

    @property
    def starts_ranks(self) -> bool:
        """Whether its output is that of several processes."""
        words = [word for word in self.words if not _ASSIGNMENT.fullmatch(word)]
        return words[0] in ("mpirun", "mpiexec") or words[:2] == ["mpidist", "run"]

    def differs(self, printed: str) -> str:
        """Say how the output differs from the page's, or nothing; ``…`` stands for anything.

        Lines of several ranks come in any order, those of one process in the page's.
        """
        got = [line.rstrip() for line in printed.replace("\0", "").splitlines()]
        got = [line.replace("\r", "") for line in got if line]
        if not self.starts_ranks:
            pattern = "".join(map(_as_pattern, self.output))
            fits = re.fullmatch(pattern, "".join(f"{line}\n" for line in got))
            return "" if fits else f"expected {self.output}, in this order:\n{printed}"
        shown = sorted(line for line in self.output if line.strip() != "…")
        left = sorted(got)
        for line in shown:
            match = next((g for g in left if re.fullmatch(_as_pattern(line), f"{g}\n")), None)
            if match is None:
                return f"{line!r} is not in the output:\n{printed}"
            left.remove(match)
        if left and len(shown) == len(self.output):
            return f"the page does not show {left}"
        return ""


def _as_pattern(line: str) -> str:
    """Give the regular expression of a line that a page shows; ``…`` alone is any lines."""
    if line.strip() == "…":
        return r"(?:.*\n)*?"
    return re.escape(line.rstrip()).replace("…", ".*") + r"\n"


def translate(words: list[str]) -> list[str]:
    """Give the command with the programs that belong to this Python."""
    beside = str(Path(PYTHON).parent)
    if words[0] == "mpidist":
        return [PYTHON, "-m", *words]
    if words[0] in ("mpirun", "mpiexec"):
        return [f"{beside}/mpiexec", *words[1:3], *translate(words[3:])]
    return [PYTHON, *words[1:]] if words[0] == "python" else words


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
        if commands and commands[-1].line.endswith("\\"):
            commands[-1].line = f"{commands[-1].line[:-1]}{line.strip()}"
        elif line.startswith("$ "):
            commands.append(Command(line[2:]))
        elif line.strip():
            commands[-1].output.append(line)
    return commands


LIMIT = 200.0  # seconds of a command; other work may be beside it
PAGES = sorted(["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.rst"))])
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
# What a time, or this machine, stands in is not compared with what is printed.
MEASURED = ("bench", "prove", "info", "explain", "list")


def pages_with(what):
    """Name the pages that have files, or commands."""
    return [page for page in PAGES if files_and_commands(ROOT / page)[what]]


@pytest.fixture(scope="session")
def catalogue():
    """The extension of docs/conf.py."""
    sys.path.insert(0, str(ROOT / "docs" / "_ext"))
    try:
        import catalogue
    finally:
        sys.path.pop(0)
    return catalogue


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", pages_with(1))
def test_commands(page, tmp_path):
    """The reader's files are written, the commands typed; the output is what the page shows."""
    files, commands = files_and_commands(ROOT / page)
    if not ALONE:
        skip_without_torch(*files.values(), *(example_of(command) for command in commands))
    shutil.copytree(ROOT / "examples", tmp_path / "examples")  # the reader is in a checkout
    for name, content in files.items():
        path = tmp_path / name
        path.write_text(content, encoding="utf-8")
    for command in commands:
        if command.words[0] in NOT_RUN:
            continue
        done = command.perform(tmp_path, LIMIT)
        err = (tmp_path / "err").read_text(errors="replace")
        assert not done.timed_out, f"{command.line}: not finished within {LIMIT} s\n{err}"
        assert bool(done.status) == command.fails, f"{command.line}: {done.status}\n{err}"
        if command.output and not set(MEASURED) & set(command.words):
            different = command.differs(done.output)
            assert not different, f"{command.line}: {different}"
        if command.runs_an_example:
            assert_learned(done.output, command.line)


def assert_learned(printed, name):
    """What an example of training prints are results: few wrong digits, a loss that has fallen."""
    losses = [float(number) for number in re.findall(r"\bloss ([\d.e+-]+\d)", printed)]
    assert not losses or losses[-1] < losses[0] / 2, f"{name}: {losses}"
    found = [float(number) for number in re.findall(r"\baccuracy ([\d.]+)%", printed)]
    assert all(90 < accuracy <= 100 for accuracy in found), f"{name}: {found}"


@pytest.mark.parametrize("page", pages_with(0))
def test_every_file_is_run(page):
    """No script stands in a page that no command of the page runs."""
    files, commands = files_and_commands(ROOT / page)
    told = " ".join(command.line for command in commands)
    assert [name for name in files if name not in told] == []
    for name, content in files.items():
        if name.endswith(".py"):
            ast.parse(content, name)


def example_of(command):
    """The script of examples/ that a command runs, or nothing."""
    found = re.search(r"examples/\w+\.py", command.line)
    return (ROOT / found[0]).read_text(encoding="utf-8") if found else ""


def skip_without_torch(*scripts):
    """Skip where scripts need what is not installed."""
    if torch is None and any("import torch" in script for script in scripts):
        pytest.skip(NEEDS_TORCH)
    for library in ("transformers", "accelerate", "lightning"):
        if any(re.search(rf"^(import|from) {library}\b", script, re.M) for script in scripts):
            pytest.importorskip(library, reason=f"needs {library}, of the extra integrations")


def run_by_a_page(name):
    """Whether a command of a page runs an example, and so `test_commands` does."""
    commands = [command for page in PAGES for command in files_and_commands(ROOT / page)[1]]
    return any(f" examples/{name}" in command.line for command in commands)


@pytest.mark.parametrize("name", [name for name in EXAMPLES if not run_by_a_page(name)])
def test_example(name):
    skip_without_torch((ROOT / "examples" / name).read_text(encoding="utf-8"))
    done = run(mpiexec(2, str(ROOT / "examples" / name)), LIMIT, environment(PYTHONPATH=str(ROOT)))
    assert done.status == 0, done.output
    assert "2 ranks: " in done.output
    assert_learned(done.output, name)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_says_how_it_is_started(name):
    text = ast.get_docstring(ast.parse((ROOT / "examples" / name).read_text(encoding="utf-8")))
    assert re.search(rf"^(.*: )?mpidist run -n \d examples/{name}\b", text, re.M)


def test_examples_are_those_of_the_pages():
    shown = {}
    for page in pages_with(0):
        shown.update({name.split("/")[-1]: content for name, content in files_of(page).items()})
    for name in EXAMPLES:
        content = (ROOT / "examples" / name).read_text(encoding="utf-8")
        assert shown[name] == content, f"examples/{name} and the page that shows it differ"


def files_of(page):
    return files_and_commands(ROOT / page)[0]


def test_order_of_output():
    """That of one process is the page's; what several ranks print comes in any."""
    one, ranks = (
        Command("mpidist show x", ["a …", "b"]),
        Command("X=1 mpidist run -n 2 x.py", ["a", "b"]),
    )
    assert one.differs("a 1\n\nb\n") == "" and ranks.differs("b\na\n") == ""
    for printed in ("b\na 1\n", "a 1\nb\nc\n", "a 1\n", "a 1\nc\nb\n"):
        assert one.differs(printed)
    assert ranks.differs("a\nb\nc\n") and ranks.differs("a\n")
    some = Command("python x.py", ["a", "…", "d"])
    assert some.differs("a\nd\n") == some.differs("a\nb\nc\nd\n") == "" and some.differs(
        "a\nd\nb\n"
    )


def test_readme_script_is_short():
    (script,) = files_of("README.md").values()
    assert len([line for line in script.splitlines() if line]) <= 15
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_readme_table_is_the_registry(catalogue):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme == catalogue.with_table(readme), "run: python docs/_ext/catalogue.py"
    table = catalogue.readme_table()
    for collective in COLLECTIVES:
        row = next(line for line in table.splitlines() if line.startswith(f"| {collective} |"))
        for algorithm in catalogue.shipped(collective):
            assert re.search(rf"\b{algorithm.name}\b", row)


def test_links_of_the_readme_lead_somewhere():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)", readme)
    assert links
    assert [link for link in links if not (ROOT / link).is_file()] == []


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_catalogue(catalogue, collective):
    """Every algorithm has its words, its code, its proof and its picture."""
    page = catalogue.collective_page(collective)
    for algorithm in catalogue.shipped(collective, one_sided=True):
        section = "\n".join(catalogue.section(algorithm))
        assert section in page
        assert algorithm.summary in section
        assert f"def {algorithm.function.__name__}" in section
        assert section.count(algorithm.summary) == 1, "the code is shown without its docstring"
        assert re.search(r"Proved on \d ranks", section)
        assert f".. image:: {catalogue.label(algorithm)}.svg\n   :alt: " in section
        assert ">rank 0<" in catalogue.picture(algorithm), "the picture"


def test_catalogue_of_pipelines(catalogue):
    page = catalogue.pipeline_sections()
    for schedule in schedules():
        assert f".. _pipeline-{schedule.name}:\n" in page and schedule.summary in page
        assert f'@pipeline_schedule("{schedule.name}"' in page
    assert "ranks, 5 microbatches::" not in page  # there is the large picture


def test_trace_of_the_gallery(catalogue):
    """The committed trace is of the form that ``mpidist show --trace`` reads."""
    drawn = catalogue.comparison(catalogue.read(catalogue.TRACE)).svg()
    assert "predicted" in drawn and "measured" in drawn


def test_commands_of_the_docs(catalogue):
    """The page of the commands holds the help of each."""
    from mpidist.cli import main

    page = catalogue.command_sections()
    context = click.Context(main)
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert f"Usage: mpidist {name}" in page
        for parameter in command.params:
            options = () if getattr(parameter, "hidden", False) else parameter.opts
            assert all(option in page for option in options if option.startswith("--"))


def test_environment_variables(catalogue):
    """Every variable that the pages name is read in the code, and the reverse."""
    pages = [(ROOT / page).read_text(encoding="utf-8") for page in PAGES]
    told = names_in([*pages, catalogue.settings_table()])
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "mpidist").rglob("*.py")]
    read = names_in(sources) | {ENVIRONMENT_PREFIX + name.upper() for name in FIELDS}
    assert told == read


def names_in(texts):
    return {name for text in texts for name in re.findall(r"\bMPIDIST_[A-Z][A-Z_]*[A-Z]", text)}


def test_messages_of_the_troubleshooting_page():
    """What the page quotes, between its ellipses, stands in the code."""
    page = (ROOT / "docs" / "troubleshooting.rst").read_text(encoding="utf-8")
    ours = page.partition("Messages of other programs")[0]
    quoted = re.findall(r"^       (``.*)$", ours, re.MULTILINE)
    assert len(quoted) > 30
    known = [text for path in (ROOT / "mpidist").rglob("*.py") for text in texts_of(path)]
    for line in quoted:
        for message in re.findall(r"``(.*?)``", line):
            parts = [part.strip(" .:;,()") for part in message.split("…")]
            parts = [part for part in parts if len(part) > 10 or part == message]
            assert parts, f"{message}: nothing to look for"
            for part in parts:
                assert any(part in text for text in known), part


def test_every_message_has_an_address():
    """It stays when the words change; pages lead to some of them, and to no other."""
    page = (ROOT / "docs" / "troubleshooting.rst").read_text(encoding="utf-8")
    rows = re.findall(r"^   \* - (?!message$)(.*)$", page, re.MULTILINE)
    names = [re.fullmatch(r"\.\. _([a-z-]+):", row)[1] for row in rows]
    assert len(set(names)) == len(names) > 50
    pages = [(ROOT / page).read_text(encoding="utf-8") for page in PAGES]
    used = {name for text in pages for name in re.findall(r":ref:`[^`]*<([\w-]+)>`", text)}
    assert len(used & set(names)) >= 5


WIDEST = 80  # of what people copy; what is printed may scroll
ADDRESS = "https://download.pytorch.org/"  # cannot be broken


@pytest.mark.parametrize("page", PAGES)
def test_lines_to_copy_are_narrow(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    pattern, indent = (_MARKDOWN, "") if page.endswith(".md") else (_RST, "   ")
    wide = []
    for block in pattern.finditer(text):
        typed = further = False
        for line in (block["body"] or "").splitlines():
            line = line.removeprefix(indent)
            typed = bool(re.match(r"\$ |(mpidist|python) (?!run:)", line)) or (typed and further)
            further = line.endswith("\\")
            if (typed or block["language"] == "python") and len(line) > WIDEST:
                wide.append(line)
    assert [line for line in wide if ADDRESS not in line] == []


# A time or a rate that something took; not a deadline or the delay of an emulated link.
FIGURE = re.compile(
    r"\b(?:took|takes?|costs?|reached|is|was)\b[^.]{0,90}?\d[\d.,]*\s(?:µs|ms|GB/s)"
    r"|\d\s+times\s+as\s+(?:fast|long)|time\sµs|x mpi4py"
)


@pytest.mark.parametrize("page", PAGES)
def test_figures_lead_to_how_they_are_measured(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    if FIGURE.search(text):
        assert "<measured>`" in text or "\n.. _measured:\n" in text, FIGURE.findall(text)


@pytest.mark.parametrize("page", [page for page in PAGES if "architecture" not in page])
def test_pages_do_not_send_a_user_to_our_tests(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert not re.findall(r"\btests/\w+|\bgoals\b", text)


def texts_of(path):
    """Give the strings of a module, one line each, with an ellipsis for what is put in."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield " ".join(node.value.split())
        elif isinstance(node, ast.JoinedStr):
            parts = [p.value if isinstance(p, ast.Constant) else "…" for p in node.values]
            yield " ".join("".join(parts).split())


def test_calls_of_the_migration_page():
    """Every call of the right column exists."""
    page = (ROOT / "docs" / "migration.rst").read_text(encoding="utf-8")
    comm = mpidist.run_simulated(1, lambda comm: comm)[0]
    model = mpidist.DDP
    kinds = {"comm": comm, "md": mpidist, "mpidist": mpidist, "model": model}
    columns = re.findall(r"^     - (.*(?:\n       .*)*)", page, re.MULTILINE)
    calls = {call for cell in columns for call in re.findall(r"\b(\w+)\.(\w+)", cell)}
    assert len([call for call in calls if call[0] in kinds]) > 30
    missing = [f"{a}.{b}" for a, b in calls if a in kinds and not hasattr(kinds[a], b)]
    assert sorted(set(missing) - {"mpidist.torch"}) == []

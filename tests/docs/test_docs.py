"""README.md, docs/ and examples/: every script and command in them does what they say."""

import ast
import re
import sys

import pytest

from mpidist.pipeline.schedules import schedules
from mpidist.schedule import COLLECTIVES
from mpidist.selection.config import ENVIRONMENT_PREFIX, FIELDS
from tests.support.doc_pages import NOT_RUN, ROOT, files_and_commands
from tests.support.processes import environment, mpiexec, run
from tests.support.training_kits import NEEDS_TORCH, torch

LIMIT = 60.0
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


@pytest.mark.timeout(240)
@pytest.mark.parametrize("page", pages_with(1))
def test_commands(page, tmp_path):
    """The reader's files are written, the commands typed; the output is what the page shows."""
    files, commands = files_and_commands(ROOT / page)
    skip_without_torch(*files.values())
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
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


@pytest.mark.parametrize("page", pages_with(0))
def test_every_file_is_run(page):
    """No script stands in a page that no command of the page runs."""
    files, commands = files_and_commands(ROOT / page)
    told = " ".join(command.line for command in commands)
    assert [name for name in files if name not in told] == []
    for name, content in files.items():
        ast.parse(content, name)


def skip_without_torch(*scripts):
    """Skip where scripts need what is not installed."""
    if torch is None and any("import torch" in script for script in scripts):
        pytest.skip(NEEDS_TORCH)


def run_by_a_page(name):
    """Whether a command of a page runs an example, and so `test_commands` does."""
    commands = [command for page in PAGES for command in files_and_commands(ROOT / page)[1]]
    return any(f"python examples/{name}" in command.line for command in commands)


@pytest.mark.parametrize("name", [name for name in EXAMPLES if not run_by_a_page(name)])
def test_example(name):
    skip_without_torch((ROOT / "examples" / name).read_text(encoding="utf-8"))
    done = run(mpiexec(2, str(ROOT / "examples" / name)), LIMIT, environment(PYTHONPATH=str(ROOT)))
    assert done.status == 0, done.output
    assert "2 ranks: " in done.output


def test_examples_are_those_of_the_pages():
    shown = {}
    for page in pages_with(0):
        shown.update({name.split("/")[-1]: content for name, content in files_of(page).items()})
    for name in EXAMPLES:
        content = (ROOT / "examples" / name).read_text(encoding="utf-8")
        assert shown[name] == content, f"examples/{name} and the page that shows it differ"


def files_of(page):
    return files_and_commands(ROOT / page)[0]


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
    for algorithm in catalogue.shipped(collective):
        section = "\n".join(catalogue.section(algorithm))
        assert section in page
        assert algorithm.summary in section
        assert f"def {algorithm.function.__name__}" in section
        assert section.count(algorithm.summary) == 1, "the code is shown without its docstring"
        assert re.search(r"Proved on \d ranks", section)
        assert re.search(r"^   time +rank 0", section, re.MULTILINE), "the picture"


def test_catalogue_of_pipelines(catalogue):
    page = catalogue.pipeline_sections()
    for schedule in schedules():
        assert f".. _pipeline-{schedule.name}:\n" in page and schedule.summary in page
        assert f'@pipeline_schedule("{schedule.name}"' in page
    assert "ranks, 5 microbatches::" not in page  # there is the large picture


def test_commands_of_the_docs(catalogue):
    """The page of the commands holds the help of each."""
    from mpidist.cli import main

    page = catalogue.command_sections()
    for name, command in main.commands.items():
        assert f"Usage: mpidist {name}" in page
        for parameter in command.params:
            assert all(option in page for option in parameter.opts if option.startswith("--"))


def test_environment_variables(catalogue):
    """Every variable that the pages name is read in the code, and the reverse."""
    pages = [(ROOT / page).read_text(encoding="utf-8") for page in PAGES]
    told = names_in([*pages, catalogue.settings_table()])
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "mpidist").rglob("*.py")]
    read = names_in(sources) | {ENVIRONMENT_PREFIX + name.upper() for name in FIELDS}
    assert told == read


def names_in(texts):
    return {name for text in texts for name in re.findall(r"\bMPIDIST_[A-Z][A-Z_]*[A-Z]", text)}

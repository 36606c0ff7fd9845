"""What CI, pre-commit and CONTRIBUTING.md name exists, and what a contributor types runs."""

import itertools
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from tests.docs.test_docs import read_commands
from tests.support.processes import environment, run
from tests.test_makefile import TARGETS
from tests.test_package import setup_cfg

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def commands_of(job):
    """Return the words of each `run:` of a job, for each combination of its matrix."""
    matrix = job.get("strategy", {}).get("matrix", {})
    for values in itertools.product(*matrix.values()):
        names = dict(zip(matrix, values, strict=True))

        def value(found, names=names):
            return names[found[1]]  # KeyError: no such entry of the matrix

        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            if "run" in step:
                line = re.sub(r"\$\{\{ matrix\.(\w+) \}\}", value, step["run"])
                assert "$" not in line
                yield shlex.split(line)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_targets_of_the_makefile(path):
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert content[True]  # "on" is a truth in YAML 1.1
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name, job in content["jobs"].items():
        assert job["runs-on"] and job["timeout-minutes"], name
        commands = list(commands_of(job))
        assert commands, name
        for program, target, *variables in commands:
            assert program == "make" and target in TARGETS, (name, target)
            for variable in variables:
                assert re.search(rf"^{variable.partition('=')[0]} \?=", makefile, re.M), variable


def test_workflows_cover_what_is_supported():
    jobs = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]
    words = [words for job in jobs.values() for words in commands_of(job)]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for variable, target in (("TORCHES", "test-torches"), ("PYTHONS", "test-pythons")):
        wanted = re.search(rf"^{variable} \?= (.*)$", makefile, re.M)[1].split()
        assert [w[2].partition("=")[2] for w in words if w[1] == target] == wanted
    known = re.search(r"^MPIS \?= (.*)$", makefile, re.M)[1].split()
    tested = [w[2].partition("=")[2] for w in words if w[1] == "test-mpis"]
    assert set(tested) <= set(known) and any("impi" in mpi for mpi in tested)
    assert {"test", "lint", "docs", "dist"} <= {w[1] for w in words}


def test_pre_commit_has_the_linter_of_the_extra():
    (asked,) = re.findall(r"^ruff>=.*$", setup_cfg()["options.extras_require"]["lint"], re.M)
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [hook["id"] for hook in repo["hooks"]] == ["ruff", "ruff-format"]
    assert all(hook["additional_dependencies"] == [asked] for hook in repo["hooks"])


def test_forms_are_of_the_forge_and_ask_for_info():
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text())
    assert form["name"] and form["description"]
    fields = {field["id"]: field for field in form["body"]}
    assert len(fields) == len(form["body"])
    assert "`mpidist info --json`" in fields["info"]["attributes"]["label"]
    assert fields["info"]["validations"]["required"] is True
    template = (ROOT / ".github/pull_request_template.md").read_text(encoding="utf-8")
    assert "`mpidist info --json`" in template


def test_citation_is_complete():
    content = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "version", "license"} <= set(content)
    assert content["license"] == setup_cfg()["metadata"]["license_expression"]


def guide_commands():
    blocks = re.findall(r"^```console\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    return [command for block in blocks for command in read_commands(block)]


def test_guide_names_targets_and_files_that_exist():
    makes = [command.words[1] for command in guide_commands() if command.words[0] == "make"]
    assert {"venv", "test", "test-all", "lint"} <= set(makes) <= set(TARGETS)
    links = re.findall(r"\]\(([^)#:]+)\)", GUIDE)
    for page in ("SECURITY.md", "CONTRIBUTING.md"):
        links += re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text(encoding="utf-8"))
    assert len(links) > 5 and [link for link in links if not (ROOT / link).exists()] == []
    paths = re.findall(r"`((?!tests)[a-z_]+/[\w/]+\.py)`", GUIDE)
    assert len(paths) > 3
    for path in paths:
        assert (ROOT / "mpidist" / path).exists(), path


def test_guide_lists_the_rooms_in_the_order_of_imports():
    table = GUIDE.partition("| room | has |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    told = [room for row in rows for room in re.findall(r"`(\w+)`", row)]
    assert told == setup_cfg()["importlinter:contract:rooms"]["layers"].split()


@pytest.mark.long
def test_guide_tests_of_a_module(tmp_path):
    """The two lines that run some tests, with this Python, and results in a folder of their own."""
    lines = [c.words for c in guide_commands() if c.words[0] == ".venv/bin/python"]
    assert len(lines) == 2
    for _, *words in lines:
        if words[0] == "tests/launch.py":
            words += ["--python", sys.executable, "--results", str(tmp_path / "results")]
        done = run([sys.executable, *words], 150, environment(), ROOT)
        assert done.status == 0 and re.search(r"[1-9]\d* passed", done.output), done.output

"""The wheel that users install has what they need; dir(mpidist) has what they use."""

import ast
import configparser
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import setuptools
from click.testing import CliRunner
from markdown_it import MarkdownIt  # of rich

import mpidist
from mpidist.cli import main
from mpidist.shared_memory import compiled

ROOT = Path(__file__).resolve().parents[1]
LEFT = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "_build", "tests", "__pycache__")


@pytest.mark.long
def test_wheel(tmp_path):
    shutil.copytree(ROOT, tmp_path / "source", ignore=LEFT)
    build = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", tmp_path)
    done = subprocess.run(
        [sys.executable, *build, tmp_path / "source"], timeout=200, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        (metadata,) = (name for name in names if name.endswith("/METADATA"))
        told = file.read(metadata).decode()
    assert links(told.partition("\n\n")[2], "") and "Requires-Python: >=3.10" in told
    if compiled.vector_width():
        assert "-cp310-abi3-" in wheel.name  # one wheel for every Python from 3.10 on
        assert "mpidist/shared_memory/_functions.abi3.so" in names
    for name in ("py.typed", "bench/report.html", "launcher/shipped/examples/digits.py"):
        assert f"mpidist/{name}" in names
    assert "mpidist_autoload.py" in names  # else `import torch` fails where mpidist is installed
    scripts = {path.name for path in (ROOT / "slurm").iterdir() if path.is_file()}
    shipped = "mpidist/launcher/shipped/slurm/"
    assert {name.removeprefix(shipped) for name in names if name.startswith(shipped)} == scripts
    assert "License-Expression: BSD-3-Clause" in told and not any("tests" in n for n in names)


def setup_cfg():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def texts():
    """What users read: the pages, the examples, and messages of the package."""
    for pattern in ("README.md", "docs/**/*.rst", "examples/*.py", "slurm/*", "mpidist/**/*.py"):
        for path in ROOT.glob(pattern):
            if path.is_file():
                yield path.relative_to(ROOT), path.read_text(encoding="utf-8")


def test_extras_that_the_pages_install():
    known = set(setup_cfg()["options.extras_require"])
    found = set()
    for path, text in texts():
        for name, extras in re.findall(r"(mpidist|\.)\[([\w,]+)\]['\"]", text):
            assert name == ".", f"{path}: no index has mpidist yet: '.[{extras}]' from a checkout"
            assert set(extras.split(",")) <= known, path
            found.update(extras.split(","))
    assert {"openmpi", "torch"} <= found


def test_one_range_of_torch():
    (asked,) = re.findall(r"^torch(>=.*)$", setup_cfg()["options.extras_require"]["torch"], re.M)
    for path, text in texts():
        for given in re.findall(r"\btorch *(>=[\d.]+, *<[\d.]+)", text):
            assert given.replace(" ", "") == asked, path


def links(text, source):
    """Check that every link of a rendered page is absolute, and return them; each is there too."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    inline = [child for token in tokens for child in token.children or ()]
    html = [token.content for token in (*tokens, *inline) if token.type.startswith("html_")]
    found = [
        str(token.attrs[key]) for token in inline for key in ("href", "src") if key in token.attrs
    ]
    found += re.findall(r"""(?:href|src|srcset)=["']([^"']+)""", "".join(html))
    for link in found:
        assert re.match("https?://|#", link), link
        if source and link.startswith(source):
            assert (ROOT / link.removeprefix(source).split("/", 3)[3]).exists(), link
    return found or True


def test_links_of_the_long_description():
    """README's links lead into the checkout, and a package index has none."""
    spec = importlib.util.spec_from_file_location("setup_of_mpidist", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **given: None)
        patch.chdir(ROOT)
        spec.loader.exec_module(module)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    with pytest.raises(AssertionError, match="docs/|examples/"):
        links(text, "")
    links(module.described(text), "")
    source = "https://example.org/mpidist"
    absolute = links(module.described(text, source), source)
    assert sum(link.startswith(source) for link in absolute) > 3


def test_dir():
    assert set(mpidist.__all__) <= set(dir(mpidist))
    assert "engine" not in dir(mpidist) and "schedule" in dir(mpidist)


def test_methods_have_docstrings_or_override_a_method_with_one():
    """The linter's D102 would ask for one at each override, too."""
    classes = {}
    for path in (ROOT / "mpidist").rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(node)

    def documented(name, method):
        nodes = classes.get(name, ())
        own = [one for node in nodes for one in node.body if getattr(one, "name", "") == method]
        bases = {ast.unparse(base).split(".")[-1] for node in nodes for base in node.bases}
        return any(map(ast.get_docstring, own)) or any(
            documented(base, method) for base in bases - {name}
        )

    public = {
        (name, method.name)
        for name, nodes in classes.items()
        for method in (one for node in nodes for one in node.body)
        if isinstance(method, ast.FunctionDef) and name[0] != "_" and method.name[0] != "_"
    }
    assert {names for names in public if not documented(*names)} == set()
    assert len(public) > 1000 and not documented("Executor", "no_such_method")


def slurm(*arguments):
    return CliRunner().invoke(main, ["slurm", *map(str, arguments)])


def test_slurm_scripts(tmp_path):
    assert "train_ddp" in slurm().output
    assert slurm("train_ddp").output == (ROOT / "slurm/train_ddp.sbatch").read_text()
    assert "did you mean 'train_ddp'" in slurm("train_dd").stderr
    assert slurm("--into", tmp_path).exit_code == 0
    assert (tmp_path / "slurm/train.py").is_file() and (tmp_path / "examples/digits.py").is_file()
    assert "exists already" in slurm("--into", tmp_path).stderr


def test_pages_name_the_versions_of_torch_that_the_extra_allows():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    (extra,) = re.findall(r"^torch(>=.*)$", settings["options.extras_require"]["torch"], re.M)
    found = {}
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.rst"), *ROOT.glob("docs/*.inc")):
        for given in re.findall(r"\btorch([<>=!~][<>=!~,.\d]+\d)", page.read_text()):
            found.setdefault(given, []).append(page.name)
    assert list(found) == [extra], found


def test_version_is_written_once():
    """Others read it from the package; what a person reads agrees with it."""
    assert setup_cfg()["metadata"]["version"] == "attr: mpidist.__version__"
    assert mpidist.__version__ == importlib.metadata.version("mpidist")
    for page in ("README.md", "docs/index.rst", "CITATION.cff"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert re.search(rf"(Status\*\*:|^version:) {re.escape(mpidist.__version__)}\b", text, re.M)


def test_page_of_versions_is_what_the_settings_allow():
    settings, page = setup_cfg(), (ROOT / "docs" / "versions.rst").read_text(encoding="utf-8")
    for requirement in ("numpy", "mpi4py"):
        (asked,) = re.findall(
            rf"^{requirement}>=.*$", settings["options"]["install_requires"], re.M
        )
        assert f"``{asked}``" in page
    pythons = re.findall(r"Python :: 3\.(\d+)$", settings["metadata"]["classifiers"], re.M)
    lowest, highest = min(map(int, pythons)), max(map(int, pythons))
    assert f"3.{lowest} to 3.{highest}" in page
    assert settings["options"]["python_requires"] == f">=3.{lowest}"

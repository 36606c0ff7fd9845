"""The gallery of the pages: every schedule on every number of ranks, or why not."""

import json
import re
import shlex
import sys
from pathlib import Path

import click.testing
import pytest

from mpidist.cli import main
from mpidist.pipeline.schedules import schedules
from mpidist.schedule import algorithms

ROOT = Path(__file__).resolve().parents[2]
MOST = 9 << 20  # bytes of all pictures; each is fetched alone
pytestmark = pytest.mark.docs


@pytest.fixture(scope="module")
def gallery():
    sys.path.insert(0, str(ROOT / "docs" / "_ext"))
    try:
        import gallery
    except ModuleNotFoundError as error:
        pytest.skip(f"needs {error.name}, of the extra docs")
    finally:
        sys.path.pop(0)
    return gallery


@pytest.fixture(scope="module")
def written(gallery, tmp_path_factory):
    """The folder and the data that the page reads."""
    folder = tmp_path_factory.mktemp("static")
    gallery.write(folder)
    script = (folder / "gallery-data.js").read_text(encoding="utf-8")
    return folder, json.loads(script.removeprefix("window.mpidistGallery=").rstrip(";\n"))


@pytest.mark.long
def test_every_algorithm_has_every_number_of_ranks(written):
    """A picture or the reason of the algorithm itself; nothing else, and no picture too many."""
    folder, data = written
    pictures = {path.name for path in (folder / "gallery").iterdir()}
    expected = set()
    for known in algorithms():
        if not known.function.__module__.startswith("mpidist.algorithms."):
            continue
        for size in range(2, 17):
            it = data["collectives"][f"{known.collective}/{known.name}/{size}"]
            half = (size + 1) // 2
            groups = (tuple(range(half)), tuple(range(half, size)))
            reason = known.unsupported(size, groups=groups if "groups" in known.uses else None)
            assert it.get("why_not") == reason
            if reason is None:
                expected.add(f"{known.collective}-{known.name}-{size}.svg".replace("_", "-"))
    assert any(it.get("why_not") for it in data["collectives"].values())
    for known in schedules():
        for key, it in data["pipelines"].items():
            name, size, count = key.split("/")
            if name == known.name:
                assert it.get("why_not") == known.unsupported(int(size), int(count))
                expected |= set() if "why_not" in it else {f"{name}-{size}-{count}.svg"}
    assert {key.split("/")[0] for key in data["pipelines"]} == {s.name for s in schedules()}
    assert pictures == expected
    assert sum(path.stat().st_size for path in (folder / "gallery").iterdir()) < MOST


def test_the_commands_draw_the_pictures(written, tmp_path):
    folder, data = written
    for key in ("allreduce/ring/5", "allreduce/hierarchical/6", "barrier/dissemination/3"):
        check(folder, key, data["collectives"][key], tmp_path)
    check(folder, "zb-h1/3/8", data["pipelines"]["zb-h1/3/8"], tmp_path)
    refused = data["collectives"]["allreduce/hierarchical/7"]
    result = click.testing.CliRunner().invoke(main, shlex.split(refused["command"])[1:])
    assert result.exit_code != 0
    assert refused["why_not"] in f"{result.output} {result.exception}"


def check(folder, key, choice, tmp_path):
    command = [*shlex.split(choice["command"])[1:], "--svg", str(tmp_path / "drawn.svg")]
    result = click.testing.CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    picture = folder / "gallery" / f"{key.replace('/', '-').replace('_', '-')}.svg"
    assert picture.read_text(encoding="utf-8") == (tmp_path / "drawn.svg").read_text("utf-8")


def test_counts_of_the_ring(written):
    says = written[1]["collectives"]["allreduce/ring/5"]["says"]
    assert "8 rounds" in says and "40 messages" in says and "8/5" in says


def test_page_without_javascript_shows_a_picture(gallery, written):
    for kind in gallery.FIRST:
        page = gallery.widget(kind)
        (source,) = re.findall(r'<img src="_static/(gallery/[^"]+)" alt="[^"]+"', page)
        assert (written[0] / source).is_file()
        assert "<form hidden aria-label=" in page and "mpidist show " in page
        assert page.count("<label>") == 3 == page.count("<select") + page.count("<input")


def test_pictures_have_a_light_and_a_dark_look(written):
    for path in (written[0] / "gallery").iterdir():
        text = path.read_text(encoding="utf-8")
        assert "prefers-color-scheme:dark" in text and 'class="paper"' in text

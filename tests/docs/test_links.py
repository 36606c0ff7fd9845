"""docs/check_links.py finds what leads nowhere."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def dead_links(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    monkeypatch.delitem(sys.modules, "check_links", raising=False)
    from check_links import dead_links

    return dead_links


def test_dead_links(tmp_path, dead_links):
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "b.html").write_text(
        '<h1 id="there">b</h1><a href="../a.html#here">a</a>'
    )
    good = '<p id="here"></p><a href="below/b.html#there">b</a><a href="#here">up</a>'
    (tmp_path / "a.html").write_text(good + '<a href="https://example.org/x#y">out</a>')
    assert dead_links(tmp_path) == []
    bad = '\n<a href="below/b.html#gone">b</a><img src="no.svg"><a href="c%20d.html">c</a>'
    (tmp_path / "a.html").write_text(good + bad)
    assert dead_links(tmp_path) == [
        "a.html:2: below/b.html#gone: no such anchor",
        "a.html:2: no.svg: no such file",
        "a.html:2: c%20d.html: no such file",
    ]

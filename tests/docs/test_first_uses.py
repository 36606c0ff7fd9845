"""The first use of a term of the glossary on a page is a link to it."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.docs
GLOSSARY = """Glossary
========

.. glossary::
   :sorted:

   rank
      A process.

   stage
   virtual stage
      A part of a model.
"""
PAGE = """A rank
======

``rank`` and *rank* are words.  Ranks have stages, and a rank has a virtual stage.

- a rank
"""


@pytest.fixture(scope="module")
def first_uses():
    sys.path.insert(0, str(ROOT / "docs" / "_ext"))
    try:
        import first_uses
    except ModuleNotFoundError as error:
        pytest.skip(f"needs {error.name}, of the extra docs")
    finally:
        sys.path.pop(0)
    return first_uses


def test_terms(first_uses):
    """They are in the alphabet's order on the page, and each ambiguous one is one of them."""
    source = (ROOT / "docs" / "glossary.rst").read_text(encoding="utf-8")
    terms = first_uses.terms_of(source)
    assert len(terms) == len(set(terms)) > 40 and "executor" in terms
    assert set(terms) >= first_uses.AMBIGUOUS
    assert "   :sorted:\n" in source
    assert not [term for term in terms if ", " in term], "one term a line: :term: finds no other"


def test_links(first_uses, tmp_path):
    """One link a term, none in a title, a literal or for an ambiguous word."""
    from sphinx.application import Sphinx

    for name, text in (("glossary", GLOSSARY), ("page", PAGE), ("index", "Index\n=====\n")):
        (tmp_path / f"{name}.rst").write_text(text, encoding="utf-8")
    (tmp_path / "conf.py").write_text("suppress_warnings = ['toc.not_included']\n")
    app = Sphinx(tmp_path, tmp_path, tmp_path / "out", tmp_path / "trees", "html", None, None)
    app.setup_extension("first_uses")
    app.build(force_all=True)
    assert app.statuscode == 0
    page = (tmp_path / "out" / "page.html").read_text(encoding="utf-8")
    found = re.findall(r'<a [^>]*href="glossary.html#term-([\w-]+)"[^>]*>(.*?)</a>', page)
    assert [(target, re.sub("<.*?>", "", text)) for target, text in found] == [
        ("rank", "Ranks"),
        ("virtual-stage", "virtual stage"),
    ]


def test_it_is_in_use():
    assert '"first_uses"' in (ROOT / "docs" / "conf.py").read_text(encoding="utf-8")

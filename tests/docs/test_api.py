"""docs/api: every page begins with tables of the names that it documents."""

import re
from importlib import import_module
from pathlib import Path

import pytest

import mpidist

API = Path(__file__).resolve().parents[2] / "docs" / "api"
PAGES = sorted(path.stem for path in API.glob("*.rst") if path.stem != "index")


def text_of(page):
    return (API / f"{page}.rst").read_text(encoding="utf-8")


def listed(page):
    """The names in the tables of a page, in their order."""
    tables = re.findall(r"^\.\. autosummary::\n   :nosignatures:\n\n((?:   .*\n)+)", page, re.M)
    return [name.strip().lstrip("~") for table in tables for name in table.splitlines()]


def documented(page):
    """The names that a page describes, those of a module's ``__all__`` among them."""
    for kind, name in re.findall(r"^\.\. auto(\w+):: (\S+)$", page, re.M):
        if kind == "module":
            yield from (f"{name}.{own}" for own in public(import_module(name)))
        elif kind != "summary":
            yield name


def public(module):
    """The names of a module that autodoc describes: its own, or those that it exports."""
    exported = getattr(module, "__all__", None)
    if exported is not None:
        return exported
    return [
        name
        for name, value in vars(module).items()
        if name[0] != "_"
        and getattr(value, "__module__", None) == module.__name__
        and value.__doc__
    ]


def test_there_are_pages():
    assert len(PAGES) >= 8


@pytest.mark.parametrize("page", PAGES)
def test_tables_list_what_the_page_documents(page):
    text = text_of(page)
    names, here = listed(text), set(documented(text))
    assert sorted(set(names)) == sorted(names), "twice in the tables"
    assert here - set(names) == set(), "in no table"
    members = {name for name in set(names) - here if name.rpartition(".")[0] in here}
    assert set(names) - here == members, "in a table, but not on the page"
    tables, _, below = text.rpartition(".. autosummary::")
    assert ".. autoclass" not in tables and ".. autofunction" not in tables, "tables come first"


def test_every_public_name_has_a_page():
    described = {name for page in PAGES for name in documented(text_of(page))}
    assert {f"mpidist.{name}" for name in mpidist.__all__} - described == set()
    ends = {name.rpartition(".")[2] for name in described}
    assert {name for name in public(mpidist.errors) if name[0].isupper()} - ends == set()


def test_every_member_of_the_communicator_is_in_a_table():
    names = {name for name in vars(mpidist.Communicator) if name[0] != "_"}
    start = "mpidist.Communicator."
    told = listed(text_of("communicator"))
    assert {name.removeprefix(start) for name in told if name.startswith(start)} == names


def test_the_first_page_leads_to_the_others():
    described = {name for page in PAGES for name in documented(text_of(page))}
    index = text_of("index")
    assert set(listed(index)) - described == set()
    assert set(re.findall(r"^   (\w+)$", index, re.M)) == set(PAGES)

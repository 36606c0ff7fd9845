"""Tables on a terminal and in a file."""

import io

from rich.console import Console

from mpidist.commands.console import make_table, print_tables, show
from mpidist.tables import Column, Line, Table

TABLE = Table(
    "",
    [Column.names(">a"), Column.numbers("time\nµs"), Column("more", narrow=False)],
    [Line(["x", "1.5", "p"]), Line(["y", "12", "q"], starts_group=False)],
)


def printed(width, terminal=False):
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, no_color=True)
    print_tables(console, [TABLE])
    return console.file.getvalue().splitlines()


def test_print_tables_file_has_heads_in_one_line_and_points_aligned():
    assert printed(1000) == [">a  time µs  more", "x       1.5  p", "y      12    q"]


def test_print_tables_narrow_terminal_leaves_columns_out():
    assert any("more" in line for line in printed(90, terminal=True))
    lines = printed(89, terminal=True)
    assert not any("more" in line for line in lines) and any("µs" in line for line in lines)


def rows(width, *cells):
    """A row of one or two cells, a name and words, without the heads."""
    console = Console(file=io.StringIO(), width=width)
    table = make_table(console, *[Column.names("name"), "words"][: len(cells)])
    table.add_row(*cells)
    show(console, table)
    return console.file.getvalue().splitlines()[1:]


def test_make_table_words_wrap_and_names_are_cut():
    name, words = "a-long-name", "some more words"
    assert rows(40, name, words) == [f"{name}  {words}"]
    assert [line.split() for line in rows(19, name, words)] == [[name, "some"], ["more"], ["words"]]
    assert rows(9, name) == ["a-long-n…"]

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


def test_make_table_columns_that_do_not_wrap_are_cut():
    console = Console(file=io.StringIO(), width=14)
    table = make_table(console, Column.names("name"), "words")
    table.add_row("a-long-name", "some more words")
    show(console, table)
    lines = console.file.getvalue().splitlines()
    assert lines[1].startswith("a-long-n") and len(lines) > 2

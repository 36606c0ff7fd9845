"""Tables as data."""

from mpidist.tables import Column, Line, Table


def test_column_of_numbers_is_right_aligned_and_whole():
    assert Column.numbers("µs") == Column("µs", "right", wrap=False, narrow=True)
    assert not Column.numbers("± %", narrow=False).narrow
    assert Column.names("candidate") == Column("candidate", "left", wrap=False)


def test_table_heads_are_those_of_its_columns():
    table = Table("", [Column.names(">a"), Column("~b")], [Line(["1", "2"])])
    assert table.heads == [">a", "~b"]

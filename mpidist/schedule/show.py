"""Pictures of schedules: ``text`` for the terminal, ``svg`` for documents."""

from __future__ import annotations

from collections.abc import Iterable

from .drawing import STRANDS, Move, Reading, draw, name_numbers
from .notebook import Svg
from .reading import read
from .registry import Algorithm, Choice, Groups

_Chosen = str | Algorithm | Choice
LEGEND = {
    "send": "→ sends to",
    "receive": "← receives from",
    "reduce": "+ receives from and combines",
    "get": "⇠ reads at",
    "put": "⇢ stores at",
    "fold": "Σ combines here, of ranks",
    "copy": "⇒ copies here",
    "meet": "═ meets",
}


def text(
    collective: str,
    choice: _Chosen,
    size: int,
    root: int = 0,
    arity: int = 2,
    groups: Groups | None = None,
    segments: int = 1,
) -> str:
    """Return a schedule as a text table of its messages: a column per rank, a row per time.

    Parameters
    ----------
    collective : str
        Name of the collective, for example ``"allreduce"``.
    choice : str, Algorithm or Choice
        The algorithm: ``"ring"``, ``"tree:4"``, or a result of :func:`~mpidist.schedule.find`.
    size, root : int
        Number of ranks, and the root.
    arity : int
        Arity for algorithms that have one, unless `choice` has it.
    groups : tuple of tuple of int, optional
        The ranks of each node; by default all ranks are on one node.
    segments : int
        Number of pieces of every block.

    Returns
    -------
    str
        Lines without a newline at the end.  Row t has the messages that end a chain of t messages,
        and the copies that follow these; the largest t is the depth of the schedule.  Copies before
        any message are in the row ``start``.

    Raises
    ------
    ScheduleError
        If the schedule is wrong: only proved schedules are drawn.
    """
    reading = read(collective, choice, size, root, arity, groups, segments)
    heads = ["time", *(f"rank {rank}" for rank in range(size))]
    rows: list[list[list[str]]] = [[[head] for head in heads]]
    for time, moves in reading.by_time():
        at: list[list[Move]] = [[] for _ in range(size)]
        for move in moves:
            for rank in {move.source, move.target}:
                at[rank].append(move)
        cells = [_cell(reading, rank, at[rank]) for rank in range(size)]
        rows.append([["start" if time == 0 else str(time)], *cells])
    return "\n".join([*_heading(reading), "", *_table(rows)])


def svg(
    collective: str,
    choice: _Chosen,
    size: int,
    root: int = 0,
    arity: int = 2,
    groups: Groups | None = None,
    segments: int = 1,
) -> str:
    """Return a schedule as a self-contained SVG: a line per rank, an arrow per message.

    Parameters and errors are those of :func:`text`.

    Returns
    -------
    str
        An ``<svg>`` element without scripts or references; a notebook shows the picture.
    """
    return Svg(draw(read(collective, choice, size, root, arity, groups, segments)))


def summary(reading: Reading) -> str:
    """Return the counts of a schedule as one line of text."""
    proof = reading.proof
    messages = (
        (proof.messages, "message in all", "messages in all"),
        (proof.blocks_moved, "block moved", "blocks moved"),
    )
    counts: tuple[tuple, ...] = (
        (proof.block_count, "block"),
        (proof.depth, "message in a row", "messages in a row"),
        *messages,
    )
    if proof.meetings:
        accesses = (
            (proof.blocks_read, "block read", "blocks read"),
            (proof.blocks_stored, "block stored", "blocks stored"),
        )
        counts = (
            (proof.block_count, "block"),
            (proof.depth, "step in a row", "steps in a row"),
            (proof.meetings, "meeting"),
            *(each for each in (*messages, *accesses) if each[0]),
        )
    return ", ".join(
        f"{n} {forms[0] if n == 1 else forms[-1] if len(forms) > 1 else forms[0] + 's'}"
        for n, *forms in counts
    )


def _heading(reading: Reading) -> list[str]:
    kinds = {move.kind for move in reading.moves}
    marks = [LEGEND["send"]] if kinds & {"receive", "reduce"} else []
    marks += [LEGEND[kind] for kind in LEGEND if kind in kinds]
    lines = [f"{reading.title}: {summary(reading)}"]
    if marks:
        marks += ["[blocks]"] if reading.proof.block_count > 1 else []
        lines.append("   ".join(marks))
    if any(reading.name(strand) for strand in reading.strands):
        lines.append(STRANDS)
    if reading.groups:
        nodes = (",".join(map(str, sorted(ranks))) for ranks in reading.groups)
        lines.append(f"ranks of each node: {' | '.join(nodes)}")
    return lines


def _cell(reading: Reading, rank: int, moves: Iterable[Move]) -> list[str]:
    """Return the lines of a cell of the text table: one rank's messages and copies at one time.

    Sends of the same blocks to several peers share a line, and so do receives.
    """
    entries: dict[tuple[str, bool, str, str], list[tuple[int, int]]] = {}
    copies = []
    for move in moves:
        name = reading.name(move.strand)
        if move.kind == "meet":
            awaited = move.ranks == tuple(range(reading.size))
            who = name_numbers(move.ranks) if move.ranks else "nobody"
            copies.append(f"{name}═ meet" if awaited else f"{name}═ await {who}")
            continue
        if move.local:
            text = move.blocks if move.kind == "fold" else move.moved
            mark = f"Σ{name_numbers(move.ranks)} " if move.kind == "fold" else ""
            copies.append(f"{name}{mark}{text}")
            continue
        if move.kind in _ACCESS:
            here, other = _ACCESS[move.kind](move)
            if here == rank:
                line = move.blocks
                mark = "⇠" if move.kind == "get" else "⇢"
                peers = entries.setdefault((name, move.kind == "get", mark, line), [])
                peers.append((move.send_index, other))
            continue
        if move.source == rank:
            out = entries.setdefault((name, False, "→", move.sent), [])
            out.append((move.send_index, move.target))
        if move.target == rank:
            mark = "+" if move.kind == "reduce" else "←"
            came = entries.setdefault((name, True, mark, move.received), [])
            came.append((move.receive_index, move.source))
    lines = []
    for (name, _, mark, blocks), peers in sorted(entries.items(), key=_line_order):
        others = ",".join(str(peer) for _, peer in sorted(peers))
        lines.append(f"{name}{mark}{others} {blocks}".rstrip())
    return lines + copies


_ACCESS = {
    "get": lambda move: (move.target, move.source),
    "put": lambda move: (move.source, move.target),
}
"""For a Get and a Put: the rank that does it, and the other one."""


def _line_order(entry: tuple[tuple[str, bool, str, str], list[tuple[int, int]]]) -> tuple:
    (name, came, _, _), peers = entry
    return name, came, min(peers)


def _table(rows: list[list[list[str]]]) -> list[str]:
    """Return the lines of a text table, with a rule below the first row.

    ``rows[i][j]`` are the lines of a cell.  Rows with tall cells are a blank line apart.
    """
    widths = [
        max(len(line) for row in rows for line in row[i] or [""]) for i in range(len(rows[0]))
    ]
    tall = any(len(cell) > 2 for row in rows for cell in row)
    lines = []
    for row in rows:
        height = max(len(cell) for cell in row)
        for k in range(height):
            parts = [cell[k] if k < len(cell) else "" for cell in row]
            lines.append("  ".join(p.ljust(w) for p, w in zip(parts, widths)).rstrip())
        if row is rows[0]:
            lines.append("  ".join("-" * width for width in widths))
        elif tall:
            lines.append("")
    return lines[:-1] if lines and not lines[-1] else lines

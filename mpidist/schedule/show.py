"""Pictures of a schedule: ``text`` for the terminal, ``svg`` for documents."""

from __future__ import annotations

from collections.abc import Iterable

from .drawing import draw
from .reading import Move, Reading, read
from .registry import Algorithm, Choice, Groups

_Chosen = str | Algorithm | Choice
LEGEND = {
    "send": "→ sends to",
    "receive": "← receives from",
    "reduce": "+ receives from and combines",
    "copy": "⇒ copies here",
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
    """Draw a schedule as a table: ranks across, times down, who sends which blocks to whom.

    Parameters
    ----------
    collective : str
        For example ``"allreduce"``.
    choice : str, Algorithm or Choice
        The algorithm: ``"ring"``, ``"tree:4"``, or what :func:`~mpidist.schedule.find` gives.
    size, root : int
        Number of ranks; the root.
    arity : int
        For algorithms that have one; an arity in `choice` comes first.
    groups : tuple of tuple of int, optional
        Which ranks share a node; by default all.
    segments : int
        Pieces that every block is cut into.

    Returns
    -------
    str
        Lines without a newline at the end.  Time t holds what can come no sooner than after t
        messages, one after the other: the number of lines is the depth of the schedule.

    Raises
    ------
    ScheduleError
        If the schedule is wrong: nothing is drawn that cannot be proved.
    """
    reading = read(collective, choice, size, root, arity, groups, segments)
    heads = ["time", *(f"rank {rank}" for rank in range(size))]
    rows: list[list[list[str]]] = [[[head] for head in heads]]
    for time in reading.times:
        moves = [move for move in reading.moves if move.time == time]
        cells = [_cell(reading, rank, moves) for rank in range(size)]
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
    """Draw a schedule as a self-contained SVG: a line for each rank, an arrow for each message.

    Parameters and errors as of :func:`text`.

    Returns
    -------
    str
        An ``<svg>`` element without scripts and references.
    """
    return draw(read(collective, choice, size, root, arity, groups, segments))


def summary(reading: Reading) -> str:
    """Give the counts of a schedule in one line."""
    proof = reading.proof
    counts = (
        (proof.block_count, "block"),
        (proof.depth, "message in a row", "messages in a row"),
        (proof.messages, "message in all", "messages in all"),
        (proof.blocks_moved, "block moved", "blocks moved"),
    )
    return ", ".join(
        f"{n} {forms[0] if n == 1 else forms[-1] if len(forms) > 1 else forms[0] + 's'}"
        for n, *forms in counts
    )


def _heading(reading: Reading) -> list[str]:
    kinds = {move.kind for move in reading.moves}
    marks = [LEGEND["send"]] if kinds - {"copy"} else []
    marks += [LEGEND[kind] for kind in ("receive", "reduce", "copy") if kind in kinds]
    lines = [f"{reading.title}: {summary(reading)}"]
    if marks:
        marks += ["[blocks]"] if reading.proof.block_count > 1 else []
        lines.append("   ".join(marks))
    if any(reading.name(strand) for strand in reading.strands):
        lines.append("a: b: … strands that run side by side")
    return lines


def _cell(reading: Reading, rank: int, moves: Iterable[Move]) -> list[str]:
    """Give the lines for one rank and time; moves of the same blocks share a line."""
    entries: dict[tuple[str, bool, str, str], list[tuple[int, int]]] = {}
    copies = []
    for move in moves:
        name = reading.name(move.strand)
        if move.kind == "copy":
            if move.target == rank:
                copies.append(f"{name}{move.sent}⇒{move.received or 'out'}")
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


def _line_order(entry: tuple[tuple[str, bool, str, str], list[tuple[int, int]]]) -> tuple:
    (name, came, _, _), peers = entry
    return name, came, min(peers)


def _table(rows: list[list[list[str]]]) -> list[str]:
    """Set cells in columns, with a blank line between rows where some have many lines."""
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

"""Pictures of schedules: ``text`` for the terminal, ``svg`` for documents."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from .notebook import Svg
from .reading import Move, Reading, name_ranks, read, runs_of
from .registry import Algorithm, Choice, Groups

_MARGIN, _TOP, _COLUMN, _LANE, _GAP = 64, 84, 130, 24, 14
_NODES = 24  # height of the line with the numbers of the nodes
_MEANING = {
    "receive": "message",
    "reduce": "message that is combined (+)",
    "get": "read by the target",
    "put": "stored by the source",
    "fold": "combined (Σ of these ranks)",
    "copy": "local copy",
    "meet": "meeting",
}
_LOCAL = ("copy", "fold")
_STYLE = (
    "text{font:12px sans-serif;fill:#222}"
    ".title{font-size:16px;font-weight:bold}"
    ".small{fill:#555}"
    ".rank{font-weight:bold;text-anchor:middle}"
    ".label,.label text{text-anchor:middle;font-size:11px}"
    ".label .left{text-anchor:start}"
    ".life{stroke:#9aa3ab;stroke-width:1.5}"
    ".grid{stroke:#d5d9dd;stroke-dasharray:3 4}"
    ".arrow{stroke-width:1.6;fill:none}"
    ".receive{stroke:#1f6fb4;marker-end:url(#receive)}#receive{fill:#1f6fb4}"
    ".reduce{stroke:#c1440e;marker-end:url(#reduce)}#reduce{fill:#c1440e}"
    ".copy{stroke:#5b6770;marker-end:url(#copy)}#copy{fill:#5b6770}"
    ".get{stroke:#2e8540;marker-end:url(#get)}#get{fill:#2e8540}"
    ".put{stroke:#7b3fa0;marker-end:url(#put)}#put{fill:#7b3fa0}"
    ".fold{stroke:#c1440e;marker-end:url(#fold)}#fold{fill:#c1440e}"
    ".meet{stroke:#444b52;stroke-width:4}"
    ".odd{stroke-dasharray:7 3}"
    ".paper{fill:#fff}.node{fill:#eef3f8}.node.odd{fill:#f8f1e6}"
    # On a page the scheme is that of the page (its color-scheme), in a viewer that of the reader.
    "@media (prefers-color-scheme:dark){"
    "text{fill:#e2e4e6}.small{fill:#a9b0b7}.life{stroke:#6f7880}.grid{stroke:#3d444b}"
    ".receive{stroke:#6cb2f0}#receive{fill:#6cb2f0}.reduce{stroke:#f58a5b}#reduce{fill:#f58a5b}"
    ".copy{stroke:#a9b4be}#copy{fill:#a9b4be}"
    ".get{stroke:#6cc27c}#get{fill:#6cc27c}.put{stroke:#c79be6}#put{fill:#c79be6}"
    ".fold{stroke:#f58a5b}#fold{fill:#f58a5b}.meet{stroke:#c5cad0}"
    ".paper{fill:#16181b}.node{fill:#1f2a36}.node.odd{fill:#332a1c}}"
)


def draw(reading: Reading) -> str:
    """Return the picture of a schedule as a self-contained ``<svg>`` element."""
    column = max(_COLUMN, 24 + 7 * max((len(_label(reading, m)) for m in reading.moves), default=0))
    copies = any(m.kind in _LOCAL for m in reading.moves)
    x = [_MARGIN + 40 + column * rank for rank in range(reading.size)]
    legend, end = _legend(reading)
    width = max(x[-1] + (column if copies else 60), 9.0 * len(reading.title) + 40, end, 520)
    body: list[str] = []
    y = top = _TOP + (_NODES if reading.groups else 0)
    for time, moves in reading.by_time():
        lanes = _lanes(reading, moves)
        bottom = y + _GAP + _LANE * (max(lanes) + 1) + _GAP // 2
        name = "start" if time == 0 else str(time)
        body.append(_text(16, (y + bottom) / 2 + 4, name, "small"))
        drawn = [_arrow(reading, m, x, y + _GAP + _LANE * lane) for m, lane in zip(moves, lanes)]
        body += [arrow for arrow, _, _ in drawn]
        body.append(f'<path class="paper" d="{"".join(paper for _, paper, _ in drawn)}"/>')
        body.append(f'<g class="label">{"".join(label for _, _, label in drawn)}</g>')
        y = bottom
        body.append(_line(10, y, width - 10, y, "grid"))
    head = [_text(16, 24, reading.title, "title"), *legend, _text(16, top - 12, "time", "small")]
    for rank, at in enumerate(x):
        head.append(_text(at, top - 12, f"rank {rank}", "rank"))
        head.append(_line(at, top - 4, at, y + 8, "life"))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{y + 20:.0f}" '
            f'viewBox="0 0 {width:.0f} {y + 20:.0f}" role="img">',
            f"<title>{escape(reading.title)}</title>",
            f"<style>{_STYLE}</style>",
            _markers(),
            '<rect class="paper" width="100%" height="100%"/>',
            *_nodes(reading, x, top - 44, y + 12),
            *head,
            *body,
            "</svg>\n",
        ]
    )


def _nodes(reading: Reading, x: list[int], top: float, bottom: float) -> list[str]:
    """Return the SVG elements of each node: a band behind its ranks' lifelines, and its number."""
    parts = []
    half = (x[1] - x[0]) / 2 - 6 if len(x) > 1 else 40
    for number, ranks in enumerate(reading.groups or ()):
        for run in runs_of(sorted(ranks)):
            first, last = run[0], run[-1]
            left, right = x[first] - half, x[last] + half
            parts.append(
                f'<rect class="node{" odd" * (number % 2)}" x="{_n(left)}" y="{_n(top)}" '
                f'width="{_n(right - left)}" height="{_n(bottom - top)}" rx="6"/>'
            )
            middle = (x[first] + x[last]) / 2
            parts.append(_text(middle, top + 14, f"node {number}", "label small"))
    return parts


def _lanes(reading: Reading, moves: list[Move]) -> list[int]:
    """Return the lane (a line of the picture) of each of the `moves` of one time.

    Arrows in one lane do not overlap; copies are below the messages.
    """
    taken: list[list[tuple[float, float]]] = []
    lanes = []
    copying: int | None = None
    for move in moves:
        low, high = sorted((move.source, move.target))
        span = (low, low + 0.9) if move.kind in _LOCAL else (float(low), float(high))
        if move.kind == "meet":
            span = (low - 0.5, low + 0.5)
        if move.kind in _LOCAL and copying is None:
            copying = len(taken)  # below the messages, since copies follow them
        free = (
            lane
            for lane, spans in enumerate(taken)
            if (copying is None or lane >= copying)
            and all(span[1] <= a or b <= span[0] for a, b in spans)
        )
        lane = next(free, len(taken))
        if lane == len(taken):
            taken.append([])
        taken[lane].append(span)
        lanes.append(lane)
    return lanes


def _label(reading: Reading, move: Move) -> str:
    """Return the text on an arrow: label of the strand, "+" if the data are combined, blocks."""
    blocks = _blocks(move)
    mark = {"reduce": "+", "fold": f"Σ{name_ranks(move.ranks)} "}.get(move.kind, "")
    return f"{reading.name(move.strand)}{mark}{blocks}".rstrip()


def _blocks(move: Move) -> str:
    """Return the blocks at the source and, if they or their buffers differ, at the target."""
    return move.sent if move.sent == move.received else _moved(move)


def _moved(move: Move) -> str:
    """Return the blocks at source and target; ``in⇒slot0[1]`` for ``in[1]`` and ``slot0[1]``."""
    source, bracket, numbers = move.sent.partition("[")
    target, _, others = move.received.partition("[")
    if bracket and source and target and numbers == others:
        return f"{source}⇒{move.received}"
    return f"{move.sent}⇒{move.received or 'out'}"


def _arrow(reading: Reading, move: Move, x: list[int], y: float) -> tuple[str, str, str]:
    """Return the arrow of a message or copy, the outline of the ground of its label, its label."""
    label = _label(reading, move)
    if move.kind == "meet":
        # One bar from rank to rank, that ends where the next rank is not awaited.
        rank, half = move.source, ((x[1] - x[0]) if len(x) > 1 else _COLUMN) / 2
        left, right = (half if r in move.ranks else 14 for r in (rank - 1, rank + 1))
        return _line(x[rank] - left, y, x[rank] + right, y, "arrow meet"), "", ""
    if move.kind in _LOCAL:
        at = x[move.source]
        hook = f'<path class="arrow {move.kind}" d="M{_n(at)} {_n(y)}h14v8h-11"/>'
        return hook, "", _text(at + 20, y + 8, label, "left")
    a, b = x[move.source], x[move.target]
    inset = 3 if a < b else -3
    odd = " odd" if move.strand and move.strand[-1] % 2 else ""
    # Near the sender: in the middle a label would cover another rank's line.
    middle = a + (b - a) / (2 * abs(move.target - move.source))
    height = y + 10 * (middle - a) / (b - a)
    arrow = (
        f'<path class="arrow {move.kind}{odd}" d="M{_n(a)} {_n(y)}L{_n(b - inset)} {_n(y + 10)}"/>'
    )
    if not label:
        return arrow, "", ""
    room = 6.2 * len(label) + 4
    paper = f"M{_n(middle - room / 2)} {_n(height - 7)}h{_n(room)}v14h{_n(-room)}z"
    return arrow, paper, _text(middle, height + 4, label)


def _legend(reading: Reading) -> tuple[list[str], float]:
    """Return the SVG elements of the legend, and the x coordinate of its end."""
    kinds = {move.kind for move in reading.moves}
    cut = reading.proof.block_count > 1
    strands = any(reading.name(strand) for strand in reading.strands)
    parts = []
    x = 16
    for kind in (k for k in _MEANING if k in kinds):
        parts.append(f'<path class="arrow {kind}" d="M{x} 44h30"/>')
        parts.append(_text(x + 38, 48, _MEANING[kind], "small"))
        x += 70 + 7 * len(_MEANING[kind])
    if cut:
        parts.append(_text(x, 48, "[blocks]", "small"))
        x += 76
    if strands:
        parts.append(_text(x, 48, STRANDS, "small"))
        x += 7 * len(STRANDS)
    return parts, x


def _markers() -> str:
    arrows = "".join(
        f'<marker id="{kind}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        f'markerHeight="7" markerUnits="userSpaceOnUse" orient="auto">'
        f'<path d="M0 0L8 4L0 8z"/></marker>'
        for kind in _MEANING
        if kind != "meet"
    )
    return f"<defs>{arrows}</defs>"


def _text(x: float, y: float, content: str, style: str = "") -> str:
    named = f' class="{style}"' if style else ""
    return f'<text{named} x="{_n(x)}" y="{_n(y)}">{escape(content)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<path class="{style}" d="M{_n(x1)} {_n(y1)}L{_n(x2)} {_n(y2)}"/>'


def _n(pixels: float) -> str:
    """Return a coordinate in tenths of a pixel, without a zero at its end."""
    return f"{pixels:.1f}".removesuffix(".0")


_Chosen = str | Algorithm | Choice
STRANDS = "a: b: … strands that run side by side"
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
            who = name_ranks(move.ranks) if move.ranks else "nobody"
            copies.append(f"{name}═ meet" if awaited else f"{name}═ await {who}")
            continue
        if move.kind in _LOCAL:
            text = _blocks(move) if move.kind == "fold" else _moved(move)
            mark = f"Σ{name_ranks(move.ranks)} " if move.kind == "fold" else ""
            copies.append(f"{name}{mark}{text}")
            continue
        if move.kind in _ACCESS:
            here, other = _ACCESS[move.kind](move)
            if here == rank:
                line = _blocks(move)
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

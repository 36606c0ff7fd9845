"""MSCCL's XML files: algorithms of GPU collectives as thread blocks of steps; read and written.

They are what msccl-tools writes and RCCL and MSCCL run: ``<algo>`` has ``<gpu>``, these have
``<tb>`` (thread blocks) with a peer to send to, one to receive from and a channel, and these have
``<step>``.  A step may wait for one of another thread block of its GPU.  Cowan et al., "MSCCLang:
Microsoft Collective Communication Language" (ASPLOS 2023); RCCL's ``msccl_parser.cc``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from xml.parsers import expat

from ...errors import InvalidArgument
from ...foreign import read_file, shown

COLLECTIVES = {
    "allreduce": "allreduce",
    "allgather": "allgather",
    "alltoall": "alltoall",
    "reduce_scatter": "reduce_scatter",
    "reducescatter": "reduce_scatter",
}
"""Our collective for each value of ``coll``; RCCL writes "reducescatter", msccl-tools the other."""
LONGEST = 64 << 20  # bytes of a file
MOST_CHUNKS = (1 << 15) - 1  # RCCL keeps the number of a chunk in 16 bits
# Of all GPUs, against files that fill the memory; 128 GPUs with all that RCCL allows have less.
MOST_BLOCKS, MOST_USES = 1 << 13, 1 << 22  # thread blocks, and chunks of all steps together
BUFFERS = ("i", "o", "s")
PROTOCOLS = ("Simple", "LL", "LL128")
SENDING, RECEIVING = ("s", "rcs", "rrs", "rrcs"), ("r", "rcs", "rrs", "rrc", "rrcs")
TYPES = ("s", "r", "rcs", "rrs", "rrc", "rrcs", "cpy", "re", "nop")
# Those steps whose source, and whose target, is a place of their own GPU.
WITH_SOURCE = ("s", "rrs", "rrc", "rrcs", "cpy", "re")
WITH_TARGET = ("r", "rcs", "rrc", "rrcs", "cpy", "re")

Chunk = tuple[str, int]  # buffer and number of the first chunk


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a thread block, and the line of the file that has it.

    It handles `count` chunks from `source` and `target` on; `after` is (thread block, step) of the
    same GPU whose end it awaits, and `awaited` whether others may await it.
    """

    line: int
    type: str
    source: Chunk
    target: Chunk
    count: int
    after: tuple[int, int] | None
    awaited: bool


@dataclass(slots=True)
class ThreadBlock:
    """A thread block: the GPUs that it sends to and receives from (-1: none), and its steps."""

    line: int
    send: int
    recv: int
    channel: int
    steps: list[Step] = field(default_factory=list)


@dataclass(slots=True)
class Gpu:
    """The thread blocks of a GPU, in the order of their ids, and the chunks of its buffers."""

    line: int
    chunks: dict[str, int]
    blocks: list[ThreadBlock] = field(default_factory=list)


@dataclass(slots=True)
class File:
    """What a file has: see the attributes of ``<algo>``.

    `chunks` is the number that the data are cut into, `inplace` and `apart` whether input and
    output may be one buffer, and whether they may be two.
    """

    what: str
    name: str
    collective: str
    chunks: int
    inplace: bool
    apart: bool
    protocol: str = "Simple"
    gpus: list[Gpu] = field(default_factory=list)


_INT, _FLAG = "a whole number", "0 or 1"
# The attributes of each element; those in the second table may be missing.
_NEEDED: dict[str, dict[str, object]] = {
    "algo": {
        **{"name": str, "ngpus": _INT, "coll": tuple(COLLECTIVES), "nchunksperloop": _INT},
        "inplace": _FLAG,
    },
    "gpu": {"id": _INT, "i_chunks": _INT, "o_chunks": _INT, "s_chunks": _INT},
    "tb": {"id": _INT, "send": _INT, "recv": _INT, "chan": _INT},
    "step": {
        **{"s": _INT, "type": TYPES, "srcbuf": BUFFERS, "srcoff": _INT, "dstbuf": BUFFERS},
        **{"dstoff": _INT, "cnt": _INT, "depid": _INT, "deps": _INT, "hasdep": _FLAG},
    },
}
_OPTIONAL: dict[str, dict[str, object]] = {
    "algo": {
        **{"proto": PROTOCOLS, "outofplace": _FLAG, "nchannels": _INT},
        **{"minBytes": _INT, "maxBytes": _INT, "maxcount": _INT, "nthreadblocks": _INT},
    },
}
_WITHIN = {"algo": None, "gpu": "algo", "tb": "gpu", "step": "tb"}


class _Reader:
    """The handlers of an XML parser, which fill in a :class:`File`; errors have line and value."""

    def __init__(self, what: str):
        self.what = what
        self.open: list[str] = []
        self.file: File | None = None
        self.ranks = self.blocks = self.uses = 0
        self.parser = expat.ParserCreate()
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.StartDoctypeDeclHandler = self._doctype
        self.parser.CharacterDataHandler = self._text

    def read(self, text: bytes) -> File:
        try:
            self.parser.Parse(text, True)
        except expat.ExpatError as error:
            raise self.error(f"not XML: {expat.ErrorString(error.code)}", error.lineno) from None
        file = self.file
        if file is None:
            raise self.error("no <algo>", 1)
        if len(file.gpus) != self.ranks:
            raise self.error(f"{len(file.gpus)} <gpu>: expected as many as ngpus={self.ranks}", 1)
        return file

    def error(self, message: str, line: int | None = None) -> InvalidArgument:
        line = self.parser.CurrentLineNumber if line is None else line
        return InvalidArgument(f"{self.what}, line {line}: {shown(message)}")

    def _doctype(self, name: str, *_: object) -> None:
        raise self.error(f"<!DOCTYPE {name}>: expected an MSCCL file, which has none")

    def _text(self, text: str) -> None:
        if text.strip():
            raise self.error(f"{text.strip()[:40]!r}: expected elements only")

    def _end(self, name: str) -> None:
        self.open.pop()

    def _start(self, name: str, found: dict[str, str]) -> None:
        outer = self.open[-1] if self.open else None
        if name not in _WITHIN or _WITHIN[name] != outer:
            expected = next((f"<{n}>" for n in _WITHIN if _WITHIN[n] == outer), "nothing")
            within = f"in <{outer}>" if outer else "first"
            raise self.error(f"<{name[:40]}> {within}: expected {expected}")
        self.open.append(name)
        needed, optional = _NEEDED[name], _OPTIONAL.get(name, {})
        known = {**needed, **optional}
        for key in found:
            if key not in known:
                raise self.error(f"<{name} {key[:40]}=…>: expected {', '.join(known)}")
        for key in needed:
            if key not in found:
                raise self.error(f"<{name}> without {key}")
        values = {key: self._value(name, key, text, known[key]) for key, text in found.items()}
        getattr(self, f"_{name}")(values)

    def _value(self, name: str, key: str, text: str, form: object) -> int | str:
        if form is str:
            return text
        if isinstance(form, tuple):
            if text not in form:
                more = ""
                if key == "coll":
                    more = ", whose meaning the file says without a root"
                raise self._unlike(name, key, text, ", ".join(form) + more)
            return text
        digits = text.removeprefix("-")
        if not (digits.isascii() and digits.isdecimal() and len(digits) < 19):
            raise self._unlike(name, key, text, str(form))
        value = int(text)
        if form is _FLAG and value not in (0, 1):
            raise self._unlike(name, key, text, _FLAG)
        return value

    def _unlike(self, name: str, key: str, value: object, expected: str) -> InvalidArgument:
        return self.error(f'<{name} {key}="{str(value)[:40]}">: expected {expected}')

    def _algo(self, at: Mapping) -> None:
        self.ranks, chunks = at["ngpus"], at["nchunksperloop"]
        if self.ranks < 1:
            raise self._unlike("algo", "ngpus", self.ranks, "a number >= 1")
        collective = COLLECTIVES[at["coll"]]
        if not 1 <= chunks <= MOST_CHUNKS:
            raise self._unlike("algo", "nchunksperloop", chunks, f"1 … {MOST_CHUNKS}")
        if collective != "allreduce" and chunks % self.ranks:
            expected = f"a multiple of ngpus={self.ranks}"
            raise self._unlike("algo", "nchunksperloop", chunks, expected)
        inplace = bool(at["inplace"])
        apart = bool(at.get("outofplace", not inplace))
        if not inplace and not apart:
            raise self._unlike("algo", "outofplace", 0, "1, or inplace 1")
        name = shown(" ".join(at["name"].split())[:80])
        self.file = File(
            self.what, name, collective, chunks, inplace, apart, at.get("proto", "Simple")
        )

    def _gpu(self, at: Mapping) -> None:
        assert self.file is not None
        if at["id"] != len(self.file.gpus):
            raise self._unlike("gpu", "id", at["id"], f"{len(self.file.gpus)}, as they ascend")
        chunks = {name: at[f"{name}_chunks"] for name in BUFFERS}
        for name, number in chunks.items():
            if not 0 <= number <= MOST_CHUNKS:
                raise self._unlike("gpu", f"{name}_chunks", number, f"0 … {MOST_CHUNKS}")
        self.file.gpus.append(Gpu(self.parser.CurrentLineNumber, chunks))

    def _tb(self, at: Mapping) -> None:
        assert self.file is not None
        blocks = self.file.gpus[-1].blocks
        if at["id"] != len(blocks):
            raise self._unlike("tb", "id", at["id"], f"{len(blocks)}, as they ascend")
        for key in ("send", "recv"):
            if not -1 <= at[key] < self.ranks or at[key] == len(self.file.gpus) - 1:
                raise self._unlike("tb", key, at[key], f"-1, or another of {self.ranks} GPUs")
        self.blocks += 1
        if self.blocks > MOST_BLOCKS:
            raise self.error(f"more than {MOST_BLOCKS} <tb>")
        line = self.parser.CurrentLineNumber
        blocks.append(ThreadBlock(line, at["send"], at["recv"], at["chan"]))

    def _step(self, at: Mapping) -> None:
        assert self.file is not None
        gpu, kind = self.file.gpus[-1], at["type"]
        block = gpu.blocks[-1]
        if at["s"] != len(block.steps):
            raise self._unlike("step", "s", at["s"], f"{len(block.steps)}, as they ascend")
        for ends, key in ((SENDING, "send"), (RECEIVING, "recv")):
            if kind in ends and getattr(block, key) < 0:
                raise self._unlike("step", "type", kind, f'a thread block with {key}="0" or more')
        if kind != "nop" and not 1 <= at["cnt"] <= MOST_CHUNKS:
            raise self._unlike("step", "cnt", at["cnt"], f"1 … {MOST_CHUNKS}")
        self.uses += at["cnt"]
        if self.uses > MOST_USES:
            raise self.error(f"more than {MOST_USES} chunks in all steps together")
        for kinds, side in ((WITH_SOURCE, "src"), (WITH_TARGET, "dst")):
            offset, room = at[f"{side}off"], gpu.chunks[at[f"{side}buf"]]
            if kind in kinds and not 0 <= offset <= room - at["cnt"]:
                name = at[f"{side}buf"]
                expected = f"{at['cnt']} of the {room} chunks of {name}"
                raise self._unlike("step", f"{side}off", offset, expected)
        after = None if at["depid"] < 0 else (at["depid"], at["deps"])
        source, target = (at["srcbuf"], at["srcoff"]), (at["dstbuf"], at["dstoff"])
        line = self.parser.CurrentLineNumber
        awaited = bool(at["hasdep"])
        block.steps.append(Step(line, kind, source, target, at["cnt"], after, awaited))


def read(path: str | os.PathLike) -> File:
    """Return what an MSCCL file has; InvalidArgument with line, element and value if it is none."""
    try:
        text = read_file(path, longest=LONGEST)
    except OSError as error:
        raise InvalidArgument(f"{os.fspath(path)}: {error.strerror or error}") from None
    return parse(text, Path(path).name)


def parse(text: bytes, what: str) -> File:
    """Return what the text of a file has; `what` names it in errors."""
    return _Reader(what).read(text)

"""A job of random calls in which one rank goes its own way, and what its flight records must say.

``mismatch_job.py SEED FOLDER [plain]`` is the program of a rank: it notes each call in
``FOLDER/RANK`` before it makes it, and is killed once all ranks have stopped.  `plain`: without
compiled code.  :func:`expected` finds by these notes alone where the ranks diverged.
"""

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from mpidist.launcher.failures import ranks_listed

KINDS = [
    "op",
    "length",
    "dtype",
    "root",
    "algorithm",
    "absent",
    "swapped",
    "message",
    "extra",
    "stops",
]
DEADLINE = 2.5  # of a wait, in seconds


def steps_of(seed: int, size: int) -> list[list[dict]]:
    """Return the calls of each rank; of `KINDS`, the mismatch is number `seed`, cyclic."""
    dice = random.Random(seed)
    kind, odd = KINDS[seed % len(KINDS)], dice.randrange(size)
    steps = []
    for _ in range(dice.randint(8, 30)):
        call = dice.choice(["allreduce", "broadcast", "barrier", "allgather", "reduce"])
        step = {"comm": dice.choice("abc"), "call": call, "way": dice.choice(["", "", "i"])}
        if call != "barrier":
            step |= {"length": dice.choice([1, 5, 40_000]), "dtype": dice.choice("fd")}
            step |= {"algorithm": dice.choice(["auto", "auto", "native", "ring"])}
        if call in ("allreduce", "reduce"):
            step |= {"op": dice.choice(["sum", "max"])}
        if call in ("broadcast", "reduce"):
            step |= {"root": dice.randrange(size) if step["comm"] != "c" else 0}
            step["algorithm"] = dice.choice(["auto", "native"])
        steps.append(step | {"times": dice.choice([1, 1, 3, 60 if call == "allreduce" else 1])})
    at = dice.randrange(4, len(steps) - 2)
    if kind in ("op", "length", "dtype", "root", "algorithm"):
        steps[at] = {"comm": "a", "call": "reduce", "way": dice.choice(["", "i"]), "times": 1}
        steps[at] |= {"length": 7, "dtype": "d", "op": "sum", "root": 0, "algorithm": "auto"}
        if kind == "algorithm":
            del steps[at]["root"]
            steps[at] |= {"call": "allreduce", kind: "ring"}
    if kind in ("absent", "stops"):
        steps[at]["comm"] = "b"  # of all ranks
    if kind == "swapped":  # two communicators in the other order
        same = {"call": "allgather", "way": "", "times": 1, "length": 5, "dtype": "d"}
        steps[at : at + 2] = [same | {"comm": name} for name in "ab"]
    ranks = [[dict(step) for step in steps] for _ in range(size)]
    mine = ranks[odd]
    other = {"op": "max", "length": 8, "dtype": "f", "root": 1 % size, "algorithm": "native"}
    if kind in other:
        mine[at][kind] = other[kind]
    elif kind == "absent":
        del mine[at]
    elif kind == "swapped":
        mine[at], mine[at + 1] = mine[at + 1], mine[at]
    elif kind == "message":
        mine.insert(at, {"comm": "a", "call": "recv", "peer": (odd + 1) % size})
    elif kind == "extra":
        mine.insert(at, {"comm": dice.choice("ab"), "call": "scan", "length": 3, "times": 1})
    else:
        mine[at:] = [{"comm": "a", "call": "sleep"}]
    return ranks


def main() -> None:
    """Run the calls of this rank, and stay there until the job is ended."""
    seed, folder = int(sys.argv[1]), Path(sys.argv[2])
    import numpy as np

    import mpidist
    from mpidist.shared_memory import compiled

    if "plain" in sys.argv:
        compiled._compiled = None
    comm = mpidist.init()
    comms = {"a": comm, "b": comm.split(0), "c": comm.split(comm.rank % 2)}
    ranks = steps_of(seed, comm.size)
    file = os.open(folder / str(comm.rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for each in comms.values():
        each.barrier()
        each.timeout = DEADLINE
    arrays = {}

    def note(*what: object) -> None:
        os.write(file, f"{json.dumps([time.monotonic_ns(), *what])}\n".encode())

    def call(step: dict) -> None:
        own, name = comms[step["comm"]], step["call"]
        if name == "sleep":
            raise SystemExit
        length, dtype = step.get("length", 1), step.get("dtype", "d")
        x = arrays.setdefault((length, dtype), np.ones(length, dtype))
        if name == "recv":
            own.recv(x, peer=step["peer"], tag=7)
            return
        known = ("op", "root", "algorithm")
        arguments = {key: step[key] for key in known if key in step}
        if name != "barrier":
            arguments["x"] = x
        for _ in range(step["times"]):
            key = [name, length, dtype, *(step.get(k) for k in known), step.get("way")]
            note(own.name, own._sequencer.sequence, key)
            made = getattr(own, step.get("way", "") + name)(**arguments)
            if step.get("way"):
                made.wait()

    try:
        for step in ranks[comm.rank]:
            call(step)
        note("stop", "done")
    except BaseException as error:
        note("stop", f"{type(error).__name__}: {error}")
    until = time.monotonic() + 60
    while time.monotonic() < until and not all(stopped(folder, r) for r in range(comm.size)):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)


def notes(folder: Path, rank: int) -> list[list]:
    """Return what a rank has noted, without a last line that is not whole."""
    try:
        *lines, _ = (folder / str(rank)).read_text().split("\n")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines]


def stopped(folder: Path, rank: int) -> bool:
    """Return whether a rank will make no further call."""
    found = notes(folder, rank)
    return bool(found) and found[-1][1] == "stop"


class Divergence(NamedTuple):
    """What is to be said of a communicator: the beginning of the line, and the number in it."""

    time: int
    line: str
    numbers: range  # a set-up may precede the call

    def said_by(self, line: str) -> bool:
        """Return whether a line of the report says this."""
        number = line[len(self.line) :].split()[0].rstrip(":;") if self.fits(line) else ""
        return number.isdecimal() and int(number) in self.numbers

    def fits(self, line: str) -> bool:
        """Return whether a line of the report names the communicator, the ranks, and how."""
        return line.startswith(self.line) and len(line) > len(self.line)


def expected(folder: Path, size: int) -> list[Divergence]:
    """Return the divergences of the communicators, in their order."""
    calls, found = [notes(folder, rank) for rank in range(size)], []
    halves = {f"world.2:{half}": range(half, size, 2) for half in range(2)}
    for name, ranks in {"world": range(size), "world.1:0": range(size), **halves}.items():
        own = {rank: [each for each in calls[rank] if each[1] == name] for rank in ranks}
        for at in range(max(map(len, own.values()), default=0)):
            here = {rank: made[at] for rank, made in own.items() if len(made) > at}
            kinds = Counter(json.dumps(each[3]) for each in here.values()).most_common()
            behind = [rank for rank in ranks if rank not in here]
            if len(kinds) > 1:
                odd = [rank for rank in here if json.dumps(here[rank][3]) != kinds[0][0]]
                how = f"{ranks_listed(odd)} diverged first, at #"
                if kinds[0][1] == kinds[1][1]:
                    how = "the ranks diverged first at #"
            elif behind:
                how = f"{ranks_listed(behind)} {'has' if len(behind) == 1 else 'have'} not begun #"
            else:
                continue
            moment = min(each[0] for each in here.values())
            number = max(each[2] for each in here.values()) + 1
            found.append(Divergence(moment, f"{name}: {how}", range(number, number + 3)))
            break
    return sorted(found)


if __name__ == "__main__":
    main()

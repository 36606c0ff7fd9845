"""Whether the kernel has killed a process of a rank's control group because memory ran out.

Standard library only: rank_process.py loads this file alone, without a package.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


class Starved:
    """The control groups of a rank's processes, and how many were killed in each before."""

    def __init__(self) -> None:
        self._before: dict[Path, int] = {}

    def see(self, pid: int) -> None:
        """Note the group of a process, which need not be that of its parent."""
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/cgroup").read_text(errors="replace").splitlines()
            for file in (file for line in lines for file in _files(line)):
                if (killed := _killed(file)) is not None:
                    self._before.setdefault(file, killed)
                    return

    def now(self) -> bool:
        """Return whether more were killed since.

        It is not known which: the processes of several ranks may be in one group.
        """
        return any((_killed(file) or 0) > before for file, before in self._before.items())


def _files(line: str) -> list[Path]:
    """Return the files that may have the count, by a line of ``/proc/PID/cgroup``."""
    _, controllers, group = line.split(":", 2)
    root, names = ROOT, ["memory.events.local", "memory.events"]
    if controllers:  # version 1
        root, names = ROOT / "memory", ["memory.oom_control"]
        names *= "memory" in controllers.split(",")
    # In a container its own group may be the root.
    return [root / where / name for where in (group.lstrip("/"), "") for name in names]


def _killed(file: Path) -> int | None:
    with suppress(OSError, ValueError, IndexError):
        words = file.read_text().split()
        return int(words[words.index("oom_kill") + 1])
    return None

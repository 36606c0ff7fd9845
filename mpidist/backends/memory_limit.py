"""How much memory the limits on this process's control groups leave, as batch systems set them.

Past such a limit a process is killed without a word, however much the machine has free.
Source: the kernel's cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

from pathlib import Path

_FILES = {  # of version 2 and 1: limit, use, and what of it can be given up at once
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
}
_NONE = 1 << 60  # version 1 writes no limit as the largest number of whole pages


def room(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> float:
    """Give the bytes that are left under all limits; infinite where there is none."""
    try:
        lines = membership.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return float("inf")
    least = float("inf")
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            version = 2
        elif "memory" in controllers.split(","):
            version = 1
        else:
            continue
        group = Path(path.lstrip("/"))
        for inner in (group, *group.parents):
            least = min(least, _left(root, inner, version))
    return least


def _left(root: Path, group: Path, version: int) -> float:
    """Give what one group has left; infinite if it has no limit or cannot be seen from here."""
    limit, use, spare = _FILES[version]
    folder = (root / limit).parent / group
    try:
        allowed = int((folder / Path(limit).name).read_text())
        if allowed >= _NONE:
            return float("inf")  # the other files take the kernel much longer
        used = int((folder / Path(use).name).read_text())
        known = (folder / "memory.stat").read_text().split()
    except (OSError, ValueError):  # also "max"
        return float("inf")
    return allowed - used + int(dict(zip(known[::2], known[1::2])).get(spare, 0))

"""The network of this host as ``mpidist info`` shows it: interfaces, routes, adapters."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from ..launcher.connections import address_of

_NET, _INFINIBAND = Path("/sys/class/net"), Path("/sys/class/infiniband")


def interface_to(host: str) -> str:
    """Return the name of the network interface for messages to `host`; empty if unknown."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            any_socket.connect((host, 9))  # sends nothing: the kernel chooses the route
            own = any_socket.getsockname()[0]
    except OSError:
        return ""
    return next((n for _, n in socket.if_nameindex() if address_of(n) == own), "")


def describe_interface(interface: str) -> str:
    """Return a network interface as text, with its address and, if known, its speed."""
    speed = ""
    try:
        megabits = int((_NET / interface / "speed").read_text())
        speed = f", {megabits / 1000:g} Gbit/s" if megabits > 0 else ""
    except (OSError, ValueError):
        pass  # a virtual interface has no speed
    return f"{interface} {address_of(interface)}{speed}".strip()


def adapters() -> list[str]:
    """Return the InfiniBand and similar adapters of this host as text, with their rates."""
    found = []
    for name in sorted(os.listdir(_INFINIBAND)) if _INFINIBAND.is_dir() else ():
        try:
            rate = (_INFINIBAND / name / "ports" / "1" / "rate").read_text().strip()
        except OSError:
            rate = ""
        found.append(f"{name} {rate}".strip())
    return found

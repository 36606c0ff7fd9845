"""Network interfaces of this host: their addresses, their speed, and which one leads to a host."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915
_NET, _INFINIBAND = Path("/sys/class/net"), Path("/sys/class/infiniband")


def address_of(interface: str) -> str:
    """Give the IPv4 address of an interface, or an empty string."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def addresses() -> list[str]:
    """List the addresses by which other hosts may reach this one, those of IPv4 first."""
    found = [address_of(name) for _, name in socket.if_nameindex() if name != "lo"]
    return [address for address in found if address] + addresses_v6()


def addresses_v6(table: Path = Path("/proc/net/if_inet6")) -> list[str]:
    """List the IPv6 addresses that are good beyond the link that they are on."""
    lines = [line.split() for line in table.read_text().splitlines()] if table.exists() else []
    return [
        socket.inet_ntop(socket.AF_INET6, bytes.fromhex(number))
        for number, _, _, scope, _, name in lines
        if scope == "00" and name != "lo"
    ]


def towards(host: str) -> str:
    """Name the interface by which messages to `host` leave; an empty string if unknown."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            any_socket.connect((host, 9))  # sends nothing: the kernel chooses the way
            own = any_socket.getsockname()[0]
    except OSError:
        return ""
    return next((n for _, n in socket.if_nameindex() if address_of(n) == own), "")


def describe(interface: str) -> str:
    """Give an interface with its address, and its speed where the driver knows it."""
    speed = ""
    try:
        megabits = int((_NET / interface / "speed").read_text())
        speed = f", {megabits / 1000:g} Gbit/s" if megabits > 0 else ""
    except (OSError, ValueError):
        pass  # a virtual one
    return f"{interface} {address_of(interface)}{speed}".strip()


def adapters() -> list[str]:
    """List InfiniBand and like adapters, with the rate of their first port."""
    found = []
    for name in sorted(os.listdir(_INFINIBAND)) if _INFINIBAND.is_dir() else ():
        try:
            rate = (_INFINIBAND / name / "ports" / "1" / "rate").read_text().strip()
        except OSError:
            rate = ""
        found.append(f"{name} {rate}".strip())
    return found

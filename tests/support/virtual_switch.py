"""A switch in userspace that joins network namespaces by links of a chosen rate and delay.

``python virtual_switch.py RATE DELAY PID=ADDRESS…`` makes a TUN device "eth0" in the network
namespace of each process, says "ok", and carries packets until it is killed: the sender's link
takes each packet at RATE bits a second, then it is under way for DELAY seconds.  Standard library
only; needs root and /dev/net/tun.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import os
import select
import socket
import struct
import subprocess
import sys
import time

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNET, PR_SET_PDEATHSIG, PR_SET_TIMERSLACK, SIGKILL = 0x40000000, 1, 29, 9
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
TUN_NO_PI_VNET_HEADER = 0x5001  # IFF_TUN | IFF_NO_PI | IFF_VNET_HDR
CHECKSUM_AND_TCP_SEGMENTS = 7  # the kernel may hand over 64 KiB at a time
HEADER = 10  # bytes of the virtual network header before each packet
TCP_IP_HEADERS, ETHERNET_FRAME = 40, 38  # Ethernet header, check sum, preamble and gap
LONGEST_QUEUE = 0.1  # seconds; what does not fit is dropped


def open_device(pid: int, address: str) -> int:
    """Make "eth0" in the network namespace of a process; give its file descriptor."""
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if LIBC.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter the network of process {pid}")
    os.close(namespace)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"eth0", TUN_NO_PI_VNET_HEADER))
    fcntl.ioctl(device, TUNSETOFFLOAD, CHECKSUM_AND_TCP_SEGMENTS)
    subprocess.check_call(["ip", "addr", "add", f"{address}/24", "dev", "eth0"])
    subprocess.check_call(["ip", "link", "set", "eth0", "txqueuelen", "2000", "up"])
    return device


def bits_on_the_wire(packet: bytes) -> int:
    """Give the bits of a packet once it is cut into Ethernet frames."""
    length, segment = len(packet) - HEADER, packet[4] | packet[5] << 8
    frames = -(-(length - TCP_IP_HEADERS) // segment) if segment else 1
    return (length + (frames - 1) * TCP_IP_HEADERS + frames * ETHERNET_FRAME) * 8


class Switch:
    """Carries packets between devices."""

    def __init__(self, rate: float, delay: float, devices: dict[str, int]):
        self.rate, self.delay = rate, delay
        self.by_address = {socket.inet_aton(a): device for a, device in devices.items()}
        self.free = dict.fromkeys(devices.values(), 0.0)  # when each sender's link is free
        self.under_way: list[tuple[float, int, int, bytes]] = []
        self.counter = itertools.count()

    def take(self, device: int) -> None:
        """Take up to 16 packets from a device."""
        for _ in range(16):
            try:
                packet = os.read(device, 65600)
            except BlockingIOError:
                return
            target = self.by_address.get(packet[26:30])
            if packet[HEADER] >> 4 != 4 or target is None:
                continue  # only IPv4, and only to each other
            now = time.perf_counter()
            begin = max(now, self.free[device])
            if begin - now > LONGEST_QUEUE:
                continue
            self.free[device] = sent = begin + bits_on_the_wire(packet) / self.rate
            entry = (sent + self.delay, next(self.counter), target, packet)
            heapq.heappush(self.under_way, entry)

    def deliver(self) -> float | None:
        """Deliver what has come; give the seconds until the next packet comes."""
        while self.under_way:
            wait = self.under_way[0][0] - time.perf_counter()
            if wait > 0:
                return wait
            _, _, target, packet = heapq.heappop(self.under_way)
            try:
                os.write(target, packet)
            except OSError:
                pass  # a node is gone, or its queue full: the packet is lost
        return None

    def run(self) -> None:
        """Carry packets for ever."""
        devices = list(self.free)
        while True:
            ready, _, _ = select.select(devices, (), (), self.deliver())
            for device in ready:
                self.take(device)


def main(rate: str, delay: str, *nodes: str) -> None:
    LIBC.prctl(PR_SET_PDEATHSIG, SIGKILL)
    LIBC.prctl(PR_SET_TIMERSLACK, 1000)  # ns
    try:  # else ranks that look for messages all the time delay the wire
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except OSError:
        pass
    pairs = [node.split("=") for node in nodes]
    devices = {address: open_device(int(pid), address) for pid, address in pairs}
    switch = Switch(float(rate), float(delay), devices)
    print("ok", flush=True)
    switch.run()


if __name__ == "__main__":
    main(*sys.argv[1:])

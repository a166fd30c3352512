"""Which address of a node others reach it at, and how it is written in a URL."""

from __future__ import annotations

import fcntl
import ipaddress
import re
import socket
import struct
from collections.abc import Iterable

from openrlhf.launcher.slurm.states import Run, run_program

SIOCGIFADDR = 0x8915
"""Linux, <linux/sockios.h>: the address of an interface."""


def pick_address(candidates: Iterable[str], *, nodes: int, host: str) -> str:
    """The first IPv4 address, else the first IPv6 address, that other nodes can use.

    Loopback serves a run on one node only; link-local addresses serve nobody. Raises ValueError with what was found.
    """
    found = list(candidates)
    parsed = [ipaddress.ip_address(text.split("%")[0]) for text in found]
    usable = [a for a in parsed if not a.is_link_local and not a.is_unspecified]
    remote = [a for a in usable if not a.is_loopback]
    for choice in (remote, usable if nodes == 1 else []):
        for address in sorted(choice, key=lambda a: a.version):
            return str(address)
    raise ValueError(
        f"{host!r} has no address that other nodes can reach (found: {', '.join(found) or 'none'}): "
        "give it one in DNS or /etc/hosts"
    )


def own_address(host: str, *, nodes: int, interface: str = "") -> str:
    """The address of this machine, known to Slurm as `host`: by its name, else by Slurm, else by its default route.

    interface: the network interface whose address it is instead.
    """
    if interface:
        return address_of(interface, host=host)
    found = resolve(host) or known_to_slurm(host)
    if not any(not ipaddress.ip_address(a.split("%")[0]).is_loopback for a in found):
        found = [*_routed(), *found]
    return pick_address(found, nodes=nodes, host=host)


def address_of(interface: str, *, host: str) -> str:
    """The IPv4 address of a network interface of this machine. Raises ValueError with those that it has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise ValueError(
                f"--interface {interface!r}: {host!r} has none of that name with an IPv4 address; it has {names}"
            ) from None
    return socket.inet_ntoa(found[20:24])


def resolve(host: str) -> list[str]:
    """All addresses of a name, in the resolver's order; empty when it has none."""
    try:
        rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return []
    return list(dict.fromkeys(str(row[4][0]) for row in rows))


def known_to_slurm(host: str, run: Run = run_program) -> list[str]:
    """The addresses that Slurm itself reaches a node at, for one whose name the resolver does not know."""
    found = re.search(r"\bNodeAddr=(\S+)", run(["scontrol", "-o", "show", "node", host]))
    return [] if found is None or found[1] == host else resolve(found[1])


def _routed() -> list[str]:
    """The source address that the kernel would use for a packet to elsewhere. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return []
        return [str(probe.getsockname()[0])]


def join_port(address: str, port: int) -> str:
    """`10.0.0.5:6379`, `[2001:db8::1]:6379`."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"

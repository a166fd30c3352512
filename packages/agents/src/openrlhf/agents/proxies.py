"""Which proxy a URL goes through: the usual environment variables, read in one way for every client of ours.

Loopback addresses never go through a proxy, which could not reach them. NO_PROXY may name hosts, domains, addresses and
networks (10.0.0.0/8), with or without a port.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from urllib.parse import urlsplit

LOOPBACK = ("localhost", "127.0.0.1", "::1")
DEFAULT_PORTS = {"http": 80, "https": 443}
VARIABLES = ("http_proxy", "https_proxy", "all_proxy")


@dataclass(frozen=True, kw_only=True, slots=True)
class Proxy:
    """A proxy and the environment variable that names it."""

    url: str
    variable: str

    def __str__(self) -> str:
        """For messages: without the password that the URL may hold."""
        parts = urlsplit(self.url)
        place = parts.netloc.rpartition("@")[2]
        shown = self.url if place == parts.netloc else parts._replace(netloc=f"***@{place}").geturl()
        return f"the proxy {shown} of {self.variable}; hosts in NO_PROXY are asked without it"


def proxy_of(url: str, environ: Mapping[str, str] | None = None) -> Proxy | None:
    """The proxy for a URL, from {scheme}_proxy or all_proxy (in capitals too, small ones first); None: none."""
    environ = os.environ if environ is None else environ
    parts = urlsplit(url)
    scheme, host = parts.scheme.lower(), (parts.hostname or "").lower()
    if is_loopback(host) or _excluded(host, parts.port or DEFAULT_PORTS.get(scheme), _no_proxy(environ)):
        return None
    for name in (f"{scheme}_proxy", "all_proxy"):
        for variable in (name, name.upper()):
            if variable in environ:
                value = environ[variable].strip()
                return Proxy(url=value if "://" in value else f"http://{value}", variable=variable) if value else None
    return None


def is_loopback(host: str) -> bool:
    """Whether a host name or an address means this machine itself."""
    address = _address(host)
    if address is None:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified


def keep_loopback_direct(environ: MutableMapping[str, str] | None = None) -> None:
    """Adds the loopback addresses to NO_PROXY where a proxy is set, for clients that are not ours.

    For processes that run an agent or a reward function: they talk to servers on their own machine, the chat server
    among them, and most clients send even that to the proxy.
    """
    environ = os.environ if environ is None else environ
    if not any(environ.get(name) or environ.get(name.upper()) for name in VARIABLES):
        return
    for name, other in (("no_proxy", "NO_PROXY"), ("NO_PROXY", "no_proxy")):
        value = environ.get(name, environ.get(other, ""))
        entries = _entries(value)
        if "*" not in entries:
            missing = [host for host in LOOPBACK if host not in entries]
            environ[name] = ",".join(([value] if value else []) + missing)


def _no_proxy(environ: Mapping[str, str]) -> str:
    return environ.get("no_proxy", environ.get("NO_PROXY", ""))


def _entries(value: str) -> list[str]:
    return value.replace(",", " ").lower().split()


def _excluded(host: str, port: int | None, no_proxy: str) -> bool:
    return any(_matches(host, port, entry.rpartition("://")[2]) for entry in _entries(no_proxy))


def _matches(host: str, port: int | None, entry: str) -> bool:
    if entry == "*":
        return True
    name, wanted = _split_port(entry)
    if wanted is not None and wanted != port:
        return False
    address = _address(host)
    network = _network(name)
    if network is not None:
        return address is not None and address in network
    name = name.removeprefix("*").removeprefix(".")
    return address is None and bool(name) and (host == name or host.endswith(f".{name}"))


def _split_port(entry: str) -> tuple[str, int | None]:
    name, colon, port = entry.rpartition(":")
    if colon and port.isdecimal() and (name.endswith("]") or ":" not in name):
        return name.strip("[]"), int(port)
    return entry.strip("[]").replace("]/", "/"), None


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _network(name: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(name, strict=False)
    except ValueError:
        return None

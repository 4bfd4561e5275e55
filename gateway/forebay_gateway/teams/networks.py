"""Where a request comes from: the socket's other end, or whom a trusted proxy names."""

import ipaddress
from collections.abc import Mapping, Sequence

from forebay_shared.settings import StartError


class Proxies:
    """The proxies whose X-Forwarded-For is believed. Raises StartError for what is no network."""

    def __init__(self, networks: Sequence[str]) -> None:
        try:
            self._networks = [ipaddress.ip_network(text) for text in networks]
        except ValueError:
            raise StartError("--trusted-proxy: not a network such as 10.0.0.0/8") from None

    def client(self, peer: tuple[str, int] | None, headers: Mapping[bytes, bytes]) -> str:
        """The nearest address that is no trusted proxy's; empty where there is none."""
        nearest = peer[0] if peer else ""
        if not self._networks or not self._trusted(nearest):
            return nearest
        named = headers.get(b"x-forwarded-for", b"").decode("latin-1").split(",")
        for address in reversed([text.strip() for text in named]):
            if not address:
                break
            nearest = address
            if not self._trusted(address):
                break
        return nearest

    def _trusted(self, address: str) -> bool:
        try:
            parsed = ipaddress.ip_address(address)
        except ValueError:
            return False
        return any(parsed in network for network in self._networks)

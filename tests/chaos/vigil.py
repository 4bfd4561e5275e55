"""Whether gateways answer for their health, all the time that something else goes on."""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

import httpx
from fleet_house import Gateway


@contextlib.contextmanager
def vigil(gateways: Sequence[Gateway]) -> Iterator[list[float]]:
    """Asks them again and again; gives how long each answer took, in s. An answer other than 200
    is an hour."""
    over, seconds = threading.Event(), list[float]()

    def watch() -> None:
        with httpx.Client(timeout=30) as client:
            while not over.wait(0.02):
                for gateway in gateways:
                    began = time.monotonic()
                    healthy = client.get(gateway.base + "/health").status_code == 200
                    seconds.append(time.monotonic() - began if healthy else 3600.0)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seconds
    finally:
        over.set()
        thread.join()

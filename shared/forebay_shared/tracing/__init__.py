"""Traces by OpenTelemetry, off unless `--otlp-traces-endpoint` names a collector.

One span of each call over HTTP, and below it what each sequence did on its worker. The place of a
span travels as W3C `traceparent`: in from the client, in `current` through the gateway's tasks, in
Submit to the worker. Without an endpoint no exporter is even loaded.
"""

import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forebay_shared.tracing.spans import Tracing

CURRENT: ContextVar[str] = ContextVar("traceparent", default="")


def current() -> str:
    """The traceparent of the call that this task works for; empty without any."""
    return CURRENT.get()


@contextmanager
def opened(endpoint: str, service: str) -> "Generator[Tracing | None]":
    """The process's traces, or None without an endpoint. Leaving sends what waits: it may block.

    Raises StartError when the endpoint is no URL.
    """
    if not endpoint:
        yield None
        return
    from forebay_shared.tracing.spans import Tracing

    tracing = Tracing(endpoint, service, f"{socket.gethostname()}:{os.getpid()}")
    try:
        yield tracing
    finally:
        tracing.close()

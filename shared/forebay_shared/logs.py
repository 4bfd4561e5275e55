"""Logging of a process: one line per event on standard error.

Events carry ids, counts and reasons; never a prompt, an answer, a key or a URL.
"""

import logging
import sys
import time
from typing import TextIO


class _Formatter(logging.Formatter):
    converter = time.gmtime

    def __init__(self, process: str) -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03dZ %(levelname)-7s {process} %(message)s", "%Y-%m-%dT%H:%M:%S"
        )


class _Handler(logging.StreamHandler[TextIO]):
    """`lost`: lines that could not be written, as the log's disk was full. Nobody else hears it."""

    lost = 0

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        if isinstance(sys.exc_info()[1], OSError):
            self.lost += 1
        else:
            super().handleError(record)


def lost_lines() -> int:
    """How many lines of this process could not be written."""
    handlers = logging.getLogger().handlers
    return sum(handler.lost for handler in handlers if isinstance(handler, _Handler))


def configure_logging(level: str, process: str) -> None:
    """Sends this process's events of `level` and above to standard error."""
    handler = _Handler(sys.stderr)
    handler.setFormatter(_Formatter(process))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    for name in ("forebay_shared", "forebay_gateway", "forebay_worker"):
        logging.getLogger(name).setLevel(level.upper())

"""Logging of a process: one line per event on standard error, plain or JSON.

Events carry ids, counts and reasons; never a prompt, an answer, a key or a URL.
"""

import logging
import sys
import time

import msgspec

_encode = msgspec.json.Encoder().encode


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, str | float] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "process": record.processName or "",
            "logger": record.name,
            "event": record.getMessage(),
        }
        if record.exc_info:
            event["traceback"] = self.formatException(record.exc_info)
        return _encode(event).decode()


class _PlainFormatter(logging.Formatter):
    converter = time.gmtime

    def __init__(self, process: str) -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03dZ %(levelname)-7s {process} %(message)s", "%Y-%m-%dT%H:%M:%S"
        )


def configure_logging(level: str, process: str, *, json_lines: bool = False) -> None:
    """Sends this process's events of `level` and above to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if json_lines else _PlainFormatter(process))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    for name in ("forebay_shared", "forebay_gateway", "forebay_worker"):
        logging.getLogger(name).setLevel(level.upper())

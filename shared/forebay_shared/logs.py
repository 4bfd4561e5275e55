"""Logging of a process: one line per event on standard error.

Events carry ids, counts and reasons; never a prompt, an answer, a key or a URL.
"""

import logging
import sys
import time


class _Formatter(logging.Formatter):
    converter = time.gmtime

    def __init__(self, process: str) -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03dZ %(levelname)-7s {process} %(message)s", "%Y-%m-%dT%H:%M:%S"
        )


def configure_logging(level: str, process: str) -> None:
    """Sends this process's events of `level` and above to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(process))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    for name in ("forebay_shared", "forebay_gateway", "forebay_worker"):
        logging.getLogger(name).setLevel(level.upper())

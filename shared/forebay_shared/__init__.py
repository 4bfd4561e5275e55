"""What both halves of forebay share: the wire, the bus, settings, errors and the command line."""

from typing import Final

__version__: Final = "0.1.0"

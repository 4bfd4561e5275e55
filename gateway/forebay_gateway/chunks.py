"""What the chunks of a body announce, read beside the HTTP parser, which tells no sizes.

A client may say that 68 GB are to come and then send nothing: who knows the size refuses it at
once, rather than when the time for the body is over. It knows no request and no limit.
"""

_MAX_LINE = 64
"""Of a chunk's first line, which begins with the size: its extensions are not looked at."""


class ChunkSizes:
    """The chunks of one request, whatever pieces it comes in, its head included. What is malformed
    is for the parser."""

    def __init__(self) -> None:
        self._left = 0
        self._line = b""
        self.announced = 0
        """Bytes of all chunks that have begun."""

    def push(self, data: bytes) -> None:
        """Takes in the next piece."""
        at = 0
        while at < len(data):
            if self._left:
                passed = min(self._left, len(data) - at)
                self._left -= passed
                at += passed
                continue
            end = data.find(b"\n", at)
            if end < 0:
                self._line = (self._line + data[at : at + _MAX_LINE])[:_MAX_LINE]
                return
            self._begin(self._line + data[at : min(end, at + _MAX_LINE)])
            self._line = b""
            at = end + 1

    def _begin(self, line: bytes) -> None:
        """A first line; or one of the head, or a trailer, which are no number."""
        try:
            size = int(line.partition(b";")[0], 16)
        except ValueError:
            return
        if size > 0:
            self.announced += size
            self._left = size + len(b"\r\n")

"""Bytes of a text/event-stream, cut anywhere, into its events' data. Knows no JSON and no HTTP.

As the WHATWG HTML standard says (section 9.2.6): lines end in LF, CR or CRLF; one space after the
colon is dropped; comments and unknown fields are skipped; an event that the end of the stream cuts
off is none. Text is never decoded here: CR and LF are no part of any UTF-8 multi-byte character, so
a cut inside one is harmless.
"""

BOM = b"\xef\xbb\xbf"


class SseParser:
    """Feed it what arrives; it returns the data of the events that are complete by then."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._after_cr = False
        self._at_start = True

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of each event that `piece` completes; its data lines are joined by LF."""
        events: list[bytes] = []
        for line in self._lines(piece):
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
                continue
            field, _, value = line.partition(b":")
            if field == b"data":
                self._data.append(value.removeprefix(b" "))
        return events

    def _lines(self, piece: bytes) -> list[bytes]:
        """The lines that `piece` completes, without their ends."""
        if self._after_cr and piece:
            piece = piece.removeprefix(b"\n")  # the CR that ended the last piece was half a CRLF
            self._after_cr = False
        if not piece:
            return []
        self._after_cr = piece.endswith(b"\r")
        text = self._rest + piece
        if self._at_start:
            if len(text) < len(BOM) and BOM.startswith(text):
                self._rest = text
                return []
            text = text.removeprefix(BOM)
            self._at_start = False
        lines = text.splitlines()  # of bytes: at LF, CR and CRLF only
        self._rest = b"" if text.endswith((b"\n", b"\r")) or not lines else lines.pop()
        return lines

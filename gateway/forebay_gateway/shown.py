"""Which tokens of an answer may be listed, by id or with their log-probability, while stop strings
are looked for: those whose text is said. It knows no tokenizer.
"""

from collections import deque


class Shown:
    """Counts the tokens of one answer that may be listed: `count`, from the first one on.

    A token waits until all of its text is out, and is never listed when a stop string turns out to
    hold all of it. Of one that begins before the stop string, `hidden` is what lies within that.
    """

    __slots__ = ("_texts", "_unsaid", "count", "hidden")

    def __init__(self) -> None:
        self.count = 0
        self.hidden = ""
        self._texts: deque[str] = deque()
        """Those of the tokens that wait."""
        self._unsaid = ""

    @property
    def complete(self) -> bool:
        """Nothing that was heard is held back."""
        return not self._unsaid

    def add(self, text: str) -> None:
        """Another token. What only begins a character has no text yet."""
        self._texts.append(text)

    def hear(self, heard: str, said: str) -> None:
        """Visible text came, and this may go out by now, with what was held back before."""
        self._unsaid = (self._unsaid + heard)[len(said) :]

    def settle(self) -> None:
        """Lets those tokens be listed whose text is out. One without any waits for the next: it may
        begin a character."""
        left = self._out()
        while left > 0 and self._texts and len(self._texts[0]) <= left:
            left -= len(self._texts[0])
            self._pop()

    def settle_all(self) -> None:
        """Lets all tokens be listed: what they gave is out, or no text at all."""
        self.count += len(self._texts)
        self._texts.clear()

    def settle_last(self) -> None:
        """A stop string has come: lets those tokens be listed of which anything is out."""
        left = self._out()
        while left > 0:
            self.hidden = self._texts[0][left:]
            left -= len(self._texts[0])
            self._pop()

    def _out(self) -> int:
        """How many characters of the waiting tokens come before what is held back: the latest, as
        parsers may have held some of them longer, or taken them out."""
        text = "".join(self._texts)
        return text.rfind(self._unsaid) if self._unsaid else len(text)

    def _pop(self) -> None:
        self._texts.popleft()
        self.count += 1

"""Poison: freed blocks are filled with NaN, so that a row that reads another's KV fails; to debug.

It knows blocks and the runner, not who had them.
"""

from forebay_worker.engine.ports import Runner


class Poison:
    """Takes each block that is freed, and in the beginning all of them."""

    def __init__(self, runner: Runner) -> None:
        self._fill = runner.poison_blocks
        self._freed = list(range(runner.num_blocks))

    def note(self, block: int) -> None:
        """A block has been freed."""
        self._freed.append(block)

    def apply(self) -> None:
        """Fills what was freed: behind the steps in flight, where rows of ended sequences may still
        write there, and before the launch of one that these blocks have been given to."""
        if self._freed:
            self._fill(self._freed)
            self._freed = []

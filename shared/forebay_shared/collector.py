"""The garbage collector of a process that serves.

What lives as long as the process is taken out of its sight, and it looks less often: a collection
of all generations stops a process for 50 ms and more once a model and its libraries are loaded.
"""

import contextlib
import gc
from collections.abc import Generator

# With gen-0 collections at the default of 700 allocations, a loaded gateway spends 5 % of its time
# looking for cycles that it does not make.
_THRESHOLDS = (20_000, 50, 50)


def calm() -> None:
    """To be called once, when all that lasts has been made."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


@contextlib.contextmanager
def held() -> Generator[None]:
    """Nothing is collected within; what could be is before."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

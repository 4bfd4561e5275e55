"""Random moments that can be had again: `CHAOS_SEED=… CHAOS_OFFSETS=… make test-chaos`."""

import os
import random
from collections.abc import Callable, Iterator

SEED = os.environ.get("CHAOS_SEED") or str(random.SystemRandom().randrange(10**6))
OFFSETS = int(os.environ.get("CHAOS_OFFSETS", "5"))
"""So many random moments for each fault."""

Moments = Callable[[int, int], Iterator[int]]
"""`for moment in moments(20, 500)`: how many parts of answers come before each fault."""

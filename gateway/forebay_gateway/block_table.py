"""BlockTable: 64-bit block hashes to small positive integers, in about 19 bytes each.

A dict takes over 100 bytes for such an entry. Here an entry is 8 bytes of key and 4 of value in a
bucket of open addressing that is between 53 and 80 % full. Buckets grow by half,
and split in two by one more bit of the hash (extendible hashing), so the longest pause is the
rebuild of one bucket, under a millisecond, however many entries there are. It knows no worker.
"""

from array import array
from collections.abc import Collection, Iterator

MAX_SLOTS = 2048
"""A bucket that would need more splits. Rebuilding so many takes 0.4 ms."""
_MIN_SLOTS = 8
_BUCKET_BYTES = 280
"""The objects of a bucket and its place in the directory, beside its slots."""
SLOT_BYTES = 12


class _Bucket:
    """Slots of (key, value); key 0 is an empty slot, value 0 a deleted one. `depth` low bits of its
    keys are equal."""

    __slots__ = ("depth", "keys", "live", "room", "slots", "used", "values")

    def __init__(self, depth: int, live: int) -> None:
        self.depth = depth
        self.slots = max(_MIN_SLOTS, live * 15 // 8 + 1)
        self.room = self.slots * 4 // 5
        self.used = 0
        """Slots with a key: live and deleted."""
        self.live = 0
        self.keys = array("Q", bytes(8 * self.slots))
        self.values = array("I", bytes(4 * self.slots))

    def find(self, key: int) -> int:
        """The slot of `key`, or -1 - s when it is not there and slot s is the one for it."""
        keys, slots = self.keys, self.slots
        slot = (key >> 32) * slots >> 32
        while (held := keys[slot]) != key:
            if not held:
                return -1 - slot
            slot += 1
            if slot == slots:
                slot = 0
        return slot

    def fill(self, slot: int, key: int, value: int) -> None:
        """Puts a new key into the empty slot that `find` gave."""
        self.keys[slot] = key
        self.values[slot] = value
        self.used += 1
        self.live += 1

    def fill_all(self, entries: Collection[tuple[int, int]]) -> None:
        """Puts new keys into an empty bucket."""
        keys, values, slots = self.keys, self.values, self.slots
        for key, value in entries:
            slot = (key >> 32) * slots >> 32
            while keys[slot]:
                slot += 1
                if slot == slots:
                    slot = 0
            keys[slot] = key
            values[slot] = value
        self.used = self.live = len(entries)

    def entries(self) -> Iterator[tuple[int, int]]:
        return ((key, value) for key, value in zip(self.keys, self.values, strict=True) if value)


class BlockTable:
    """Hashes are whole numbers below 2**64, evenly spread; 0 is taken as 1."""

    def __init__(self) -> None:
        self._directory = [_Bucket(0, 0)]
        self._live = 0
        self.nbytes = _BUCKET_BYTES + _MIN_SLOTS * SLOT_BYTES

    def __len__(self) -> int:
        return self._live

    def get(self, key: int) -> int:
        """The value of `key`; 0 when it has none."""
        key = key or 1
        bucket = self._directory[key & (len(self._directory) - 1)]
        slot = bucket.find(key)
        return bucket.values[slot] if slot >= 0 else 0

    def put(self, key: int, value: int) -> int:
        """Sets the value of `key`, 0 deletes it; returns the one before, 0 for none."""
        key = key or 1
        place = key & (len(self._directory) - 1)
        bucket = self._directory[place]
        slot = bucket.find(key)
        if slot >= 0:
            before = bucket.values[slot]
            bucket.values[slot] = value
            change = (value > 0) - (before > 0)
            bucket.live += change
            self._live += change
            return before
        if value:
            bucket.fill(-1 - slot, key, value)
            self._live += 1
            if bucket.used > bucket.room:
                self._rebuild(bucket, place)
        return 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """All (key, value). The table must not change meanwhile."""
        for at, bucket in enumerate(self._directory):
            if at < 1 << bucket.depth:
                yield from bucket.entries()

    @property
    def places(self) -> int:
        """Places of the directory, for `bucket` and `compact`; a bucket may have several."""
        return len(self._directory)

    def bucket(self, place: int) -> list[tuple[int, int]]:
        """The entries of the bucket at `place`; none at its further places."""
        bucket = self._directory[place]
        return list(bucket.entries()) if place < 1 << bucket.depth else []

    def compact(self, place: int) -> None:
        """Gives back what deleted entries of a bucket take; joins it with its twin when both are
        small."""
        bucket = self._directory[place]
        if place >= 1 << bucket.depth or bucket.live == bucket.used:
            return
        if bucket.depth:
            low = place & (1 << bucket.depth - 1) - 1
            twin = self._directory[place ^ 1 << bucket.depth - 1]
            if twin.depth == bucket.depth and bucket.live + twin.live < MAX_SLOTS // 8:
                self._drop(twin)
                self._drop(bucket)
                self._install(bucket.depth - 1, low, [*bucket.entries(), *twin.entries()])
                return
        self._rebuild(bucket, place)

    def _rebuild(self, bucket: _Bucket, place: int) -> None:
        """Makes a bucket anew without its deleted slots: larger, smaller, or two of it."""
        entries = list(bucket.entries())
        low = place & (1 << bucket.depth) - 1
        self._drop(bucket)
        if len(entries) * 15 // 8 < MAX_SLOTS:
            self._install(bucket.depth, low, entries)
            return
        bit = 1 << bucket.depth
        if bit == len(self._directory):
            self._directory += self._directory
            self.nbytes += 8 * bit
        for half in (0, bit):
            part = [entry for entry in entries if entry[0] & bit == half]
            self._install(bucket.depth + 1, low | half, part)

    def _drop(self, bucket: _Bucket) -> None:
        self.nbytes -= _BUCKET_BYTES + bucket.slots * SLOT_BYTES

    def _install(self, depth: int, low: int, entries: list[tuple[int, int]]) -> None:
        """A bucket for the hashes whose `depth` low bits are `low`, with its first entries."""
        bucket = _Bucket(depth, len(entries))
        self.nbytes += _BUCKET_BYTES + bucket.slots * SLOT_BYTES
        bucket.fill_all(entries)
        for place in range(low, len(self._directory), 1 << depth):
            self._directory[place] = bucket

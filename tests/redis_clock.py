"""A redis-server whose clock a test moves: a small shared object stands between it and the C
library, and adds what is in a file to the time of day. What only counts on stays as it is."""

import contextlib
import mmap
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_house import RedisServer, redis_running

_SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long *offset_s;

static long offset(void) {
    if (!offset_s) {
        int fd = open(getenv("TEST_CLOCK"), O_RDONLY);
        offset_s = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, fd, 0);
        close(fd);
    }
    return *offset_s;
}

int clock_gettime(clockid_t id, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, id, now);
    if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE))
        now->tv_sec += offset();
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now) *now = exact.tv_sec;
    return exact.tv_sec;
}
"""


class Clock:
    """How far the clock of a redis-server is off. `variables` are those of its process."""

    def __init__(self, directory: Path) -> None:
        if (compiler := shutil.which("cc")) is None:
            pytest.skip("no C compiler: the clock of Redis cannot be moved")
        source, library, file = (directory / name for name in ("clock.c", "clock.so", "offset"))
        source.write_text(_SOURCE)
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
        file.write_bytes(bytes(8))
        with file.open("r+b") as opened:
            self._offset = mmap.mmap(opened.fileno(), 8)
        self.variables = {"LD_PRELOAD": str(library), "TEST_CLOCK": str(file)}

    def jump(self, seconds: int) -> None:
        """From now on it shows so much more, or less, than it did."""
        [before] = struct.unpack("q", self._offset[:])
        self._offset[:] = struct.pack("q", before + seconds)

    def close(self) -> None:
        self._offset.close()


@contextlib.contextmanager
def redis_with_a_clock() -> Iterator[tuple[RedisServer, Clock]]:
    with tempfile.TemporaryDirectory(prefix="fb-") as directory:
        clock = Clock(Path(directory))
        try:
            with redis_running(**clock.variables) as redis:
                yield redis, clock
        finally:
            clock.close()

"""The last resort: ends this process from outside the interpreter, whose lock a thread may keep.

A process that stood still (SIGSTOP, a paused machine) finds its time out the moment it goes on, so
that is never the end yet: the timer's signal only sets an alarm, and there is time to call again.
All of it is done by the kernel and by functions of the C library, as handlers. It knows no engine.
"""

import ctypes
import faulthandler
import signal
import time
from collections.abc import Callable
from functools import partial

# No processor of today raises it. Systems without it have no timers of this kind either.
_FIRST: signal.Signals = getattr(signal, "SIGSTKFLT", signal.SIGALRM)
GRACE_S = float(_FIRST)
"""From the first signal to the end: `alarm`, its handler, takes its number for seconds."""
EXIT_CODE = int(signal.SIGALRM)
"""`_exit` is the handler of the second, and takes its number for a status. The default action would
not end a container's first process."""


def last_resort() -> Callable[[float], None]:
    """A function that ends the process GRACE_S after so many seconds, unless it is called again,
    and shows the stacks of its threads on stderr.

    Where the C library has no such timers it ends it at once, also one that stood still.
    """
    try:
        return _Alarm()
    except (AttributeError, OSError):
        return partial(faulthandler.dump_traceback_later, exit=True)


class _Event(ctypes.Structure):
    """`sigevent`: `notify` 0 is by a signal."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("number", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_char * 48),
    )


class _Due(ctypes.Structure):
    """`itimerspec`: it rings once."""

    _fields_ = (
        ("every_s", ctypes.c_long),
        ("every_ns", ctypes.c_long),
        ("in_s", ctypes.c_long),
        ("in_ns", ctypes.c_long),
    )


class _Alarm:
    def __init__(self) -> None:
        self._libc = libc = ctypes.CDLL(None, use_errno=True)
        self._timer = ctypes.c_void_p()
        event = _Event(number=_FIRST)
        if libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)):
            raise OSError(ctypes.get_errno(), "timer_create")
        libc.signal(_FIRST, ctypes.cast(libc.alarm, ctypes.c_void_p))
        libc.signal(signal.SIGALRM, ctypes.cast(libc._exit, ctypes.c_void_p))

    def __call__(self, timeout_s: float) -> None:
        due = _Due(in_s=int(timeout_s), in_ns=int(timeout_s % 1 * 1e9))
        self._libc.timer_settime(self._timer, 0, ctypes.byref(due), None)
        signal.setitimer(signal.ITIMER_REAL, 0)  # the alarm, if it was set
        faulthandler.dump_traceback_later(timeout_s + GRACE_S / 2)

"""How many threads the CPU path should use. It knows the machine, not the model."""

import os
from pathlib import Path

TOPOLOGY = Path("/sys/devices/system/cpu")
QUOTA = Path("/sys/fs/cgroup/cpu.max")


def physical_cores() -> int:
    """Physical cores that this process may use, by affinity, hyper-threads and cgroup quota."""
    cores = {_core(cpu) for cpu in os.sched_getaffinity(0)}
    return max(1, min(len(cores), _quota()))


def _core(cpu: int) -> str:
    """A name for the physical core of a logical one: the list of its threads."""
    try:
        return (TOPOLOGY / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _quota() -> int:
    """Whole cores' time that the container may use; all of them when nothing limits it."""
    try:
        quota, period = QUOTA.read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return os.cpu_count() or 1

"""What this machine is: for records, benchmarks and the default number of workers."""

import os
import platform

__all__ = ["cores", "processor"]


def cores() -> int:
    """Those this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            found = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        found = ""
    return found or platform.processor() or "unknown"

"""Keep freed memory in the process: a training step frees and asks for the same large blocks again and again.

glibc gives blocks of some megabytes back to the system at once, and the next step pays for fresh, zeroed pages.
Measured on LeNet: the FP8 step is 1.14 to 1.15 times the float step without this, 1.10 to 1.12 with it.
"""

import ctypes

__all__ = ["keep_freed_memory"]

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h


def keep_freed_memory() -> bool:
    """Tell glibc's allocator of this process; False where there is another allocator."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    settings = {M_MMAP_THRESHOLD: 32 << 20, M_TRIM_THRESHOLD: 1 << 30, M_TOP_PAD: 64 << 20}
    return all(mallopt(option, value) == 1 for option, value in settings.items())

"""The machine that figures were taken on, as far as the system tells."""

import os
import platform
import sys
from pathlib import Path

from headlong.version import __version__


def describe() -> dict[str, str | int]:
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count() or 0,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "headlong": __version__,
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def peak_memory() -> int | None:
    """The most bytes this process has held in memory; None where the system does not count them."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held if sys.platform == "darwin" else held * 1024

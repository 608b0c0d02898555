"""The machine that figures were taken on, as far as the system tells."""

import os
import platform
import sys
from collections.abc import Mapping

from headlong.engine.tuning import cpu_name
from headlong.version import __version__


def describe() -> dict[str, str | int]:
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count() or 0,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "headlong": __version__,
    }


def about(device: str, facts: Mapping[str, str | int]) -> str:
    """A device and what `describe` says of its machine, in a line."""
    return f"{device}; {facts['cpu']}, {facts['cores']} cores; headlong {facts['headlong']}"


def peak_memory() -> int | None:
    """The most bytes this process has held in memory; None where the system does not count them."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held if sys.platform == "darwin" else held * 1024

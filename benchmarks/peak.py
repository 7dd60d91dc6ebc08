"""How much memory a piece of work takes at its peak, as the kernel counts it (Linux)."""

import re
from collections.abc import Callable
from pathlib import Path


def peak_bytes(work: Callable[[], object]) -> int:
    """Largest resident memory while the work goes on, less what was resident before it."""
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = _kib("VmRSS")
    work()
    return (_kib("VmHWM") - before) * 1024


def _kib(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])

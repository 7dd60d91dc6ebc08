"""What vLLM loads into each of its processes: nothing elsewhere, and a process that ends with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path

from flowrl.nodes._backend import vllm_plugin

ENGINE = """
import os, threading
from flowrl.model import ModelSpec
from flowrl.node import Context
from flowrl.nodes._backend.chat import ChatFormat
from flowrl.nodes._backend.vllm_start import make_engine

if __name__ == "__main__":
    make_engine(Context(model="m", models={"m": ModelSpec(path="arith-tiny")}), ChatFormat(), None, 1, {})
    print("ready", flush=True)
    threading.Event().wait()
"""


def children_of(pid: int) -> set[int]:
    """All processes below one, however deep."""
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found |= {child} | children_of(child)
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_vllm_finds_the_plugin() -> None:
    (found,) = [each for each in entry_points(group="vllm.general_plugins") if each.name == "flowrl"]
    assert found.load() is vllm_plugin.register


def test_outside_an_engine_it_does_nothing_and_imports_nothing() -> None:
    code = (
        "import sys; before = set(sys.modules); from flowrl.nodes._backend.vllm_plugin import register; register();"
        "print({m.partition('.')[0] for m in set(sys.modules) - before} & {'vllm', 'torch', 'numpy', 'pydantic'})"
    )
    environment = {name: value for name, value in os.environ.items() if name != vllm_plugin.MARK}
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "set()"


def test_a_killed_worker_leaves_no_process_of_vllm_behind(tmp_path: Path) -> None:
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert any(line.strip() == "ready" for line in worker.stdout)
        children = children_of(worker.pid)
        assert len(children) >= 2
        worker.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(map(is_running, children)):
        time.sleep(0.1)
    assert not [pid for pid in children if is_running(pid)]

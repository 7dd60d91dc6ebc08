"""What `pip install flowrl` brings along: the library, the pipelines, the model and the schema."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_wheel_holds_nodes_pipelines_the_model_and_the_schema(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    (wheel,) = tmp_path.glob("flowrl-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("nodes", "pipelines"):
        shipped = {f"flowrl/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob("*") if path.is_file()}
        assert {name for name in shipped if "__pycache__" not in name} <= names
    assert {"flowrl/schema/pipeline.json", "flowrl/py.typed", "flowrl/cli.py"} <= names
    assert not any(name.startswith(("nodes/", "pipelines/", "tests/")) for name in names)


def test_the_library_cannot_be_imported_under_a_second_name() -> None:
    done = subprocess.run([sys.executable, "-c", "import nodes"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "flowrl.nodes" in done.stderr.splitlines()[-1]

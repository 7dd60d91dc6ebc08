"""docs/first-hour.md is run command by command; `pytest --update-golden` writes its outputs anew."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "first-hour.md"
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.M | re.S)
# What differs from one run, or one machine, to the next.
VARYING = [
    (re.compile(r"(reward|loss) +-?[\d.e-]+"), r"\1 #"),
    (re.compile(r" +[\d,]+ tok/s +[\d.]+ s  eta [\d:]+"), " # tok/s"),
    (re.compile(r"^( +(?:mean|loss|KL|entropy|response|seconds|of these|tokens a)[^\d-]*?) +[\d-].*$", re.M), r"\1#"),
    (re.compile(r"[\d:.]+ of start-up"), "# of start-up"),
    (re.compile(r"steps in [\d:]+"), "steps in #"),
    (re.compile(r"-\d{8}-\d{6}"), "-TIME"),
    (re.compile(r"in \d+\.\d+s"), "in #s"),
    (re.compile(r"MiB in [\d.]+ s, of which the run waited [\d.]+ s"), "MiB in # s"),
    (re.compile(r"^loading models: still waiting.*\n", re.M), ""),
    (re.compile(r"of \d+ CPU"), "of # CPU"),
]


def steady(text: str) -> str:
    """The text without what differs from run to run."""
    for pattern, replacement in VARYING:
        text = pattern.sub(replacement, text)
    return text.strip()


def commands(block: str) -> list[tuple[str, str]]:
    """The commands of a block with their outputs; a here-document belongs to its command."""
    found: list[tuple[list[str], list[str]]] = []
    end = ""
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append(([line[2:]], []))
            heredoc = re.search(r"<<'(\w+)'", line)
            end = heredoc[1] if heredoc else ""
        elif end:
            found[-1][0].append(line)
            end = "" if line == end else end
        else:
            found[-1][1].append(line)
    return [("\n".join(command), "\n".join(output)) for command, output in found]


def run(command: str, folder: Path) -> str:
    """What a shell prints for the command, errors included."""
    bin_folder = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "100"}
    environment.pop("PYTEST_CURRENT_TEST", None)
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, text=True, timeout=240,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return re.sub(r"[ \t]+$", "", done.stdout.replace(str(folder), "~/rl"), flags=re.M).rstrip("\n")


def test_the_first_hour_is_as_the_page_says(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    text = PAGE.read_text(encoding="utf-8")
    updating = request.config.getoption("--update-golden")
    wrong: list[str] = []

    def replay(match: re.Match[str]) -> str:
        lines = []
        for command, expected in commands(match[1]):
            printed = run(command, tmp_path)
            if steady(printed) != steady(expected) and not updating:
                wrong.append(f"$ {command}\n--- the page says\n{expected}\n--- printed\n{printed}")
            lines += [f"$ {command}", *([printed] if printed else [])]
        return "```console\n" + "\n".join(lines) + "\n```"

    replayed = BLOCK.sub(replay, text)
    if updating:
        PAGE.write_text(replayed, encoding="utf-8")
    assert not wrong, "\n\n".join(wrong) + "\n\n`pytest --update-golden` writes the page anew"
    assert len(BLOCK.findall(text)) > 5

"""The processes that score: killed with all that they started, gone with their parent, several where rows take long.

The rewards are functions in a file of the user's, as they are written in practice.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl.batch import Batch, Prompt, Sample
from flowrl.engine.call import NodeSetup
from flowrl.engine.scorer import Scorer
from flowrl.fields import FieldType
from flowrl.functions import code_named_in
from flowrl.metrics import Failure, collect
from flowrl.node import Context
from flowrl.registry import find
from flowrl.rows import Rows

FAULTS = textwrap.dedent(
    """
    import asyncio, ctypes, os, re, signal, subprocess, sys, time
    import numpy as np

    def fault(how):
        if how == "raise":
            raise ZeroDivisionError("nothing to divide")
        if how == "power":
            pow(3, 10**9)
        if how == "regex":
            re.match(r"(a+)+$", "a" * 64 + "b")
        if how == "sleep":
            time.sleep(60)
        if how == "exit":
            sys.exit(0)
        if how == "_exit":
            os._exit(0)
        if how == "segfault":
            ctypes.string_at(0)
        return {"None": None, "NaN": float("nan"), "inf": np.inf, "text": "1.0", "list": [1.0], "dict": {"other": 1.0},
                "complex": 1j, "array": np.ones(2)}[how]

    def single(response, answer):
        return fault(response) if response != answer else 1

    def batch(response, answer):
        return [single(*pair) for pair in zip(response, answer)]

    def miscounts(response, answer):
        return [1.0 for one, right in zip(response, answer) if one == right]

    async def later(response, answer):
        await asyncio.sleep(0.01)
        return single(response, answer)

    async def never(response, answer):
        if response != answer:
            await asyncio.sleep(60)
        return 1.0

    def alarmed(response):
        def ring(*_):
            raise OSError("rang")
        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        try:
            time.sleep(5)
        except OSError:
            return 1.0
        return 0.0

    def starts_others(response):
        own = subprocess.Popen(["sleep", "300"])
        other = subprocess.Popen(["sleep", "300"], start_new_session=True)
        subprocess.run("setsid sleep 300 & sleep 0.05", shell=True)
        with open(response, "a") as file:
            file.write(f"{own.pid} {other.pid} ")
        if response.endswith("hang"):
            time.sleep(60)
        if response.endswith("die"):
            os._exit(3)
        return 1.0

    def kills(response, answer):
        if response == answer:
            time.sleep(0.05)
            return 1.0
        subprocess.Popen(["sleep", "300"])
        subprocess.Popen(["sleep", "300"], start_new_session=True)
        subprocess.run("setsid sleep 300 & sleep 0.05", shell=True)
        parent = os.getppid()
        grandparent = int(open(f"/proc/{parent}/stat").read().rpartition(")")[2].split()[1])
        if response == "group":
            os.killpg(0, signal.SIGKILL)
        if response == "parent":
            os.kill(parent, signal.SIGKILL)
        if response == "grandparent":
            os.kill(grandparent, signal.SIGKILL)
        if response == "group of the parent":
            os.killpg(os.getpgid(parent), signal.SIGTERM)
        if response == "itself":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    def leaves(response):
        if response == "look":
            handlers = [signal.getsignal(one) for one in (signal.SIGALRM, signal.SIGCHLD, signal.SIGTERM)]
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
            time.sleep(0.3)
            return float(not mask and not any("ring" in repr(one) or one == signal.SIG_IGN for one in handlers))
        def ring(*_):
            raise OSError("rang")
        signal.signal(signal.SIGALRM, signal.SIG_DFL if response == "deadly" else ring)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if response == "masked":
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        signal.setitimer(signal.ITIMER_REAL, 0.1, 0.0005 if response == "often" else 0)
        if response in ("often", "masked"):
            time.sleep(0.2) if response == "masked" else signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        return 1.0

    def leaves_all(response):
        return [leaves(one) for one in response]

    def pools(response):
        import multiprocessing
        with multiprocessing.get_context("fork").Pool(1) as pool:
            return pool.map(len, [response])[0]
    """
)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Any]:
    """Makes scorers of functions of the file, and closes them."""
    file = tmp_path / "faults.py"
    file.write_text(FAULTS)
    scorers: list[Scorer] = []

    def make(function: str, can_kill: bool = True, timeout: float = 0.5, **params: Any) -> Scorer:
        params = {"call": f"{file}:{function}", **params}
        reads = {"response": ("response",), "answer": ("answer",)}
        ref = find("reward.function", Path())
        code = code_named_in(params)
        spec = NodeSetup("reward", ref, params, None, reads, {}, (), "unscored", timeout, code)
        scorers.append(Scorer(spec, Context(), can_kill))
        return scorers[-1]

    yield make
    for scorer in scorers:
        scorer.close()


def batch(responses: list[str]) -> Batch:
    rows = Rows.of([f"u{index}" for index in range(len(responses))])
    columns = {"response": Sample(rows, responses), "answer": Prompt(rows, ["good"] * len(responses))}
    return Batch(rows, columns, {"response": FieldType("Sample", "str"), "answer": FieldType("Prompt", "str")})


def score(scorer: Scorer, responses: list[str]) -> tuple[list[float], list[Failure]]:
    with collect() as report:
        reward, _ = scorer.score(batch(responses))
    return reward.values.tolist(), report.failures


OF_VALUES = ["raise", "exit", "None", "NaN", "inf", "text", "list", "dict", "complex", "array"]
OF_PROCESSES = ["power", "regex", "sleep", "_exit", "segfault"]


@pytest.mark.parametrize("params", [{}, {"batch": True}, {"function": "later"}], ids=["single", "batch", "async"])
@pytest.mark.parametrize("how", [*OF_VALUES, *OF_PROCESSES])
def test_a_bad_row_has_no_score_and_good_ones_beside_it_keep_theirs(made: Any, params: Any, how: str) -> None:
    function = params.get("function", "batch" if params else "single")
    rest = {name: value for name, value in params.items() if name != "function"}
    scores, failures = score(made(function, **rest), ["good", how, "good"])
    assert np.array_equal(scores, [1.0, np.nan, 1.0], equal_nan=True)
    assert [failure.rows for failure in failures] == [("u1_0_0",)]


@pytest.mark.parametrize("function", ["single", "batch", "later"])
def test_without_processes_a_bad_value_costs_its_row_alone_too(made: Any, function: str) -> None:
    scorer = made(function, can_kill=False, batch=function == "batch")
    scores, failures = score(scorer, ["good", *OF_VALUES, "good"])
    assert np.array_equal(scores, [1.0, *[np.nan] * len(OF_VALUES), 1.0], equal_nan=True)
    assert len(failures) == len(OF_VALUES)


def test_a_wrong_count_is_told_of_the_rows_that_cause_it(made: Any) -> None:
    scores, failures = score(made("miscounts", batch=True), ["good", "bad", "good"])
    assert np.array_equal(scores, [1.0, np.nan, 1.0], equal_nan=True)
    assert [failure.error for failure in failures] == ["BadAnswer: it returned 0 values for 1 samples"]


def test_async_rows_have_their_time_limit_each_and_wait_together(made: Any) -> None:
    start = time.monotonic()
    scores, failures = score(made("never", timeout=0.3), ["good", "slow"] * 20)
    assert time.monotonic() - start < 3
    assert np.array_equal(scores, [1.0, np.nan] * 20, equal_nan=True)
    assert {failure.error for failure in failures} == {"TimeoutError: no answer within 0.3 s"}


def test_rows_that_hang_are_waited_for_side_by_side_where_there_are_cores(made: Any) -> None:
    scorer = made("single", timeout=1)
    start = time.monotonic()
    _, failures = score(scorer, ["sleep"] * 6)
    assert len(failures) == 6
    if len(os.sched_getaffinity(0)) > 1:
        assert time.monotonic() - start < 6


def test_an_alarm_inside_a_row_rings_in_it(made: Any) -> None:
    assert score(made("alarmed", timeout=4), ["a"])[0] == [1.0]


def test_a_row_may_start_processes_of_its_own(made: Any) -> None:
    assert score(made("pools", timeout=20), ["abc"])[0] == [3.0]


@pytest.mark.parametrize("function", ["leaves", "leaves_all"])
@pytest.mark.parametrize("can_kill", [True, False])
def test_what_a_row_does_to_signals_ends_with_it(made: Any, function: str, can_kill: bool) -> None:
    before = signal.getsignal(signal.SIGCHLD)
    whole = {"batch": True, "batch_size": 1} if function == "leaves_all" else {}
    scorer = made(function, can_kill, timeout=5, **whole)
    rows = ["ring", "look", "deadly", "look", "often", "look", *["masked", "look"] * can_kill]
    assert score(scorer, rows) == ([1.0] * len(rows), [])
    assert signal.getsignal(signal.SIGCHLD) is before


def test_an_alarm_that_somebody_else_has_set_goes_on(made: Any) -> None:
    before = signal.setitimer(signal.ITIMER_REAL, 60)
    try:
        score(made("leaves", can_kill=False), ["ring"])
        assert 50 < signal.getitimer(signal.ITIMER_REAL)[0] <= 60
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)


def alive(pids: list[int]) -> list[int]:
    states = {pid: Path(f"/proc/{pid}/stat") for pid in pids}
    return [
        pid for pid, stat in states.items() if stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
    ]


def sleepers() -> set[int]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes() == b"sleep\x00300\x00":
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("name", ["hang", "die", "done"])
def test_what_a_row_has_started_ends_with_its_process(made: Any, tmp_path: Path, name: str) -> None:
    before, file = sleepers(), tmp_path / name
    scorer = made("starts_others", timeout=1)
    score(scorer, [str(file)])
    if name == "done":
        assert len(sleepers() - before) == 3
        scorer.close()
    deadline = time.monotonic() + 3
    while (sleepers() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not sleepers() - before
    assert not alive([int(pid) for pid in file.read_text().split()])


@pytest.mark.parametrize("whom", ["group", "parent", "grandparent", "group of the parent", "itself"])
def test_a_row_that_kills_its_surroundings_costs_itself_and_leaves_nothing(made: Any, whom: str) -> None:
    before = sleepers()
    scores, failures = score(made("kills", timeout=3), ["good", whom, "good"])
    assert np.array_equal(scores, [1.0, np.nan, 1.0], equal_nan=True)
    assert [failure.rows for failure in failures] == [("u1_0_0",)]
    assert failures[0].error.startswith("RuntimeError: the scoring process died (")
    deadline = time.monotonic() + 3
    while (sleepers() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not sleepers() - before


def test_a_process_in_a_loop_of_c_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    (tmp_path / "faults.py").write_text(
        FAULTS.replace("pow(3, 10**9)", "open('pid', 'w').write(str(os.getpid())); pow(3, 10**9)")
    )
    code = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_scorer_processes import *
        if __name__ == "__main__":
            params = {{"call": "{tmp_path}/faults.py:single"}}
            reads = {{"response": ("response",), "answer": ("answer",)}}
            spec = NodeSetup("r", find("reward.function", Path()), params, None, reads, {{}}, (), "unscored", 60.0)
            score(Scorer(spec, Context(), True), ["power"])
    """
    (tmp_path / "main.py").write_text(textwrap.dedent(code))
    parent = subprocess.Popen([sys.executable, "main.py"], cwd=tmp_path)
    deadline = time.monotonic() + 20
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        assert parent.poll() is None
        time.sleep(0.02)
    pid = int((tmp_path / "pid").read_text())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 5
    while alive([pid]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive([pid])


def test_a_file_on_another_machine_is_not_needed(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def score(response): return len(response)\n")
    params = {"call": f"{file}:score"}
    spec = NodeSetup("r", find("reward.function", Path()), params, None, {"response": ("response",)}, {}, (),
                     "unscored", 5.0, code_named_in(params))  # fmt: skip
    file.unlink()
    scorer = Scorer(spec, Context(), can_kill=True)
    try:
        assert score(scorer, ["abc"])[0] == [3.0]
    finally:
        scorer.close()

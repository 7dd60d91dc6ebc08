"""The scripted engine: it says what the script says, and needs no torch."""

import subprocess
import sys
import time

import pytest

from flowrl.batch import Prompt
from flowrl.metrics import collect
from flowrl.model import ModelSpec
from flowrl.node import Context
from flowrl.nodes._backend.engine import engines_of
from flowrl.nodes._backend.fake import FakeEngine
from flowrl.nodes._backend.script import Script
from flowrl.nodes.rollout.generate import Generate
from flowrl.rows import Rows


def rolled(script: Script, max_tokens: int = 4, num_prompts: int = 2, group_size: int = 3) -> list[Generate.Out]:
    node = Generate(engine="fake", max_tokens=max_tokens, script=script)
    node.setup(Context(model="policy", models={"policy": ModelSpec(path="anything")}))
    rows = Rows([f"u{i}" for i in range(num_prompts)], planned=[group_size] * num_prompts, settled=[0] * num_prompts)
    return list(node.run(Prompt(rows, ["a"] * num_prompts)))


def test_sessions_answer_with_the_texts_in_turn() -> None:
    (first, second) = rolled(Script(texts=["12", "345678"]))
    assert list(first.response) == list(second.response) == ["12", "3456", "12"]
    assert list(first.finish_reason) == ["stop", "length", "stop"]
    assert first.response_ids.lengths.tolist() == [3, 4, 3]


def test_a_scripted_failure_is_absent_and_settled() -> None:
    with collect() as report:
        out, *_ = rolled(Script(texts=["1", None]))
    assert out.rows.names() == ["u0_0_0", "u0_2_0"]
    assert out.rows.planned.tolist() == out.rows.settled.tolist() == [3]
    assert [failure.rows for failure in report.failures] == [("u0_1_0",), ("u1_1_0",)]


def test_a_group_that_failed_altogether_is_reported_as_settled_without_rows() -> None:
    out, *_ = rolled(Script(texts=[None]))
    assert (len(out.rows), out.rows.uids, out.rows.settled.tolist()) == (0, ("u0",), [3])


def test_groups_come_in_the_order_of_their_scripted_times() -> None:
    start = time.monotonic()
    blocks = rolled(Script(seconds=[0.05, 0.0]))
    assert [block.rows.uids for block in blocks] == [("u1",), ("u0",)]
    assert time.monotonic() - start >= 0.05


def test_token_ids_stay_below_the_vocabulary() -> None:
    out, *_ = rolled(Script(texts=["xyzé"], vocabulary=20), max_tokens=9)
    assert set(out.response_ids.values.tolist()) <= set(range(20))


def test_library_nodes_import_without_torch() -> None:
    code = "import sys, importlib\nfrom flowrl.registry import find, library_names\nfrom pathlib import Path\n"
    code += "for name in library_names(): find(name, Path()).load()\n"
    code += "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'accelerate', 'ray')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_an_engine_that_two_rollouts_share_is_ended_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[FakeEngine] = []
    monkeypatch.setattr(FakeEngine, "close", lambda engine: ended.append(engine))
    context = Context(model="policy", models={"policy": ModelSpec(path="anything")})
    nodes = [Generate(engine="fake", max_tokens=tokens) for tokens in (4, 8)]
    for node in nodes:
        node.setup(context)
    assert len(engines_of(context)) == 1
    for node in nodes:
        node.close()
    assert len(ended) == 1 and not engines_of(context)


@pytest.mark.parametrize(
    ("path", "given", "words"), [("arith-tiny", None, 20), ("anything", None, 257), ("arith-tiny", 5, 5)]
)
def test_a_real_model_can_read_the_tokens(path: str, given: int | None, words: int) -> None:
    engine = FakeEngine(Script(vocabulary=given), path)
    ids = {token for tokens in engine.encode([bytes(range(128)).decode(), "é"]) for token in tokens}
    assert max(ids) < words
    assert len(ids) > min(words, 100) - 2

"""Pipelines compared by what they mean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowrl.graph.diff import as_data, as_text
from flowrl.pipeline import load

DEFAULT = Path(__file__).parents[3] / "pipelines" / "grpo_sync.yaml"


def lines(*sets: str) -> list[str]:
    """The differences that these overrides make."""
    return [f"{change.section}: {change}" for change in load(DEFAULT).diff(load(DEFAULT, sets))]


def test_a_pipeline_does_not_differ_from_itself_with_its_defaults_written_out(tmp_path: Path) -> None:
    (tmp_path / "resolved.yaml").write_text(load(DEFAULT).resolved())
    changes = load(DEFAULT).diff(load(tmp_path / "resolved.yaml"))
    assert changes == ()
    assert as_text(changes) == "no difference"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("nodes.actor_update.minibatch=8", "nodes: ~ actor_update.minibatch: 16 -> 8"),
        ("nodes.reward.timeout=3", "nodes: ~ reward.timeout: null -> 3.0"),
        ("models.policy.optimizer.lr=1e-6", "models: ~ policy.optimizer.lr: 0.0003 -> 1e-06"),
        ("pools.train.workers=2", "pools: ~ train.workers: 1 -> 2"),
        ("batch.group=4", "batch: ~ group: 8 -> 4"),
        ("name=other", "pipeline: ~ name: grpo_sync -> other"),
        ("run.seed=3", "run: ~ seed: 0 -> 3"),
        ("schedule={mode: sync}", ""),
    ],
)
def test_one_changed_setting_is_one_line(override: str, line: str) -> None:
    assert lines(override) == ([line] if line else [])


def test_a_renamed_field_shows_in_nodes_edges_and_fields() -> None:
    found = lines("nodes.reward.writes={reward: score}", "nodes.advantage.reads={reward: score}")
    assert found == [
        "nodes: ~ advantage.reads.reward: reward -> score",
        "nodes: ~ reward.writes.reward: reward -> score",
        "edges: - reward -> advantage (reward)",
        "edges: + reward -> advantage (score)",
        "fields: - reward: {type: Sample[float], writer: reward}",
        "fields: + score: {type: Sample[float], writer: reward}",
    ]


def test_a_new_node_and_a_node_that_is_gone() -> None:
    found = lines("nodes.ref_logprob=null", "models.reference=null", "nodes.actor_update.kl_coef=0")
    assert "nodes: - ref_logprob: model.logprob" in found
    assert "edges: - ref_logprob -> actor_update (ref_log_probs)" in found
    assert "models: - reference: {path: arith-tiny}" in found


def test_of_a_new_model_or_pool_what_is_not_left_at_its_default_is_told() -> None:
    found = lines(
        "models.critic={path: arith-tiny, head: value, trainable: true, optimizer: {lr: 0.1}}",
        "pools.spare={workers: 2}",
    )
    assert found == [
        "models: + critic: {path: arith-tiny, head: value, trainable: true, optimizer: {lr: 0.1}}",
        "pools: + spare: {workers: 2}",
    ]
    back = load(DEFAULT, ["nodes.ref_logprob=null", "nodes.actor_update.kl_coef=0"]).diff(load(DEFAULT))
    assert "nodes: + ref_logprob: model.logprob" in [f"{change.section}: {change}" for change in back]


def test_files_of_the_same_name_differ_where_their_text_does(tmp_path: Path) -> None:
    code = "from flowrl import Node, Sample\nclass Mine(Node):\n    def run(self, reward: Sample[float]) -> None: ...\n"
    pipelines = []
    for name, text in {"one": code, "two": code, "three": f"{code}    other: int = 1\n"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(text)
        file = tmp_path / name / "mine.yaml"
        file.write_text("extends: grpo_sync\nname: mine\nnodes: {mine: {use: ./mine.py:Mine}}\n")
        pipelines.append(load(file))
    one, two, three = pipelines
    assert one.diff(two) == ()
    assert "nodes: + mine: ./mine.py:Mine" in [f"{change.section}: {change}" for change in load(DEFAULT).diff(one)]
    (use, _) = one.diff(three)
    assert str(use) == f"~ mine.use: {tmp_path}/one/mine.py:Mine -> {tmp_path}/three/mine.py:Mine"


def test_the_differences_are_data_for_tools() -> None:
    data = as_data(load(DEFAULT).diff(load(DEFAULT, ["batch.group=4"])))
    assert json.loads(json.dumps(data)) == {
        "format": 1,
        "changes": [{"section": "batch", "kind": "changed", "what": "group", "before": 8, "after": 4}],
    }

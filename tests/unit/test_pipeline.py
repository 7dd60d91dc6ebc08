"""The Python API builds, checks, plans, draws and compares the same document as the command line."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import pytest
import yaml

import flowrl
from flowrl.errors import PipelineError
from flowrl.pipeline import VIEWS

DEFAULT = Path(__file__).parents[2] / "pipelines" / "grpo_sync.yaml"


def document() -> dict[str, Any]:
    """The default pipeline as Python values."""
    data: dict[str, Any] = yaml.safe_load(DEFAULT.read_text())
    return data


def test_a_mapping_and_a_file_are_the_same_pipeline() -> None:
    built, loaded = flowrl.Pipeline(document()), flowrl.load(DEFAULT)
    assert built.check() == loaded.check() == ()
    assert built.diff(loaded) == ()
    for view in set(VIEWS) - {"svg"}:
        assert built.draw(view) == loaded.draw(view), view


def test_overrides_and_goals_work_from_python_as_from_the_command_line() -> None:
    pipeline = flowrl.Pipeline(document(), sets=["batch.prompts=8"], to_nodes=["advantage"])
    assert pipeline.plan().document.batch.prompts == 8
    assert set(pipeline.plan().graph.nodes) == {"rollout", "reward", "advantage"}
    assert set(flowrl.load(DEFAULT, to_nodes=["reward"]).plan().graph.nodes) == {"rollout", "reward"}


def test_a_wrong_pipeline_raises_all_its_problems_when_it_is_planned_or_drawn() -> None:
    wrong = {**document(), "batch": {"prompts": 0, "group": "8"}}
    pipeline = flowrl.Pipeline(wrong)
    assert [problem.code for problem in pipeline.check()] == ["FR007", "FR006"]
    for use in (pipeline.plan, pipeline.draw, pipeline.run):
        with pytest.raises(PipelineError) as raised:
            use()
        assert raised.value.problems == pipeline.check()


def test_a_view_that_there_is_not_is_a_plain_error() -> None:
    with pytest.raises(ValueError, match="tree, mermaid, dot"):
        flowrl.load(DEFAULT).draw("png")


def test_a_notebook_shows_the_page() -> None:
    shown = flowrl.load(DEFAULT)._repr_html_()
    page = html.unescape(shown.split('srcdoc="')[1].split('" style')[0])
    assert page == flowrl.load(DEFAULT).draw("html")


def test_a_notebook_shows_what_is_wrong() -> None:
    shown = flowrl.Pipeline({**document(), "batch": {"prompts": 0, "group": 8}})._repr_html_()
    assert shown.startswith("<pre>error[FR007] &lt;python&gt;")


def test_relative_paths_of_a_pipeline_in_python_start_at_its_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text((DEFAULT.parents[1] / "examples/custom_node/my_nodes.py").read_text())
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 32)
    data = document()
    data["nodes"]["reward"]["writes"] = {"reward": "raw"}
    data["nodes"]["shape"] = {
        "use": "./mine.py:LengthPenalty",
        "reads": {"reward": "raw"},
        "writes": {"shaped_reward": "reward"},
    }
    data["data"] = {"train": {"type": "jsonl", "path": "data.jsonl"}}
    assert flowrl.Pipeline(data, folder=tmp_path).check() == ()
    assert {problem.code for problem in flowrl.Pipeline(data).check()} == {"FR009", "FR018"}


def test_sizes_follow_from_the_lengths_given() -> None:
    pipeline = flowrl.load(DEFAULT)
    assert "prompts of 12 tokens" in pipeline.draw("plan", prompt_tokens=12, response_tokens=4)
    assert '"prompt_tokens": 12' in pipeline.draw("json", prompt_tokens=12, response_tokens=4)


def test_a_pruned_plan_says_what_it_saves() -> None:
    text = flowrl.load(DEFAULT, ["nodes.actor_update.kl_coef=0", "run.prune=true"]).draw("plan")
    (line,) = [line for line in text.splitlines() if "ref_logprob" in line]
    assert "ref_logprob" in line
    assert "GFLOP" in text


@pytest.mark.parametrize("wrong", ["grpo_sync", [1], None, DEFAULT])
def test_what_is_no_mapping_is_told_how_to_be_loaded(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"flowrl\.load"):
        flowrl.Pipeline(wrong)


def test_one_goal_or_override_may_be_given_without_a_list() -> None:
    one = flowrl.load(DEFAULT, "batch.prompts=8", "advantage").plan()
    other = flowrl.Pipeline(document(), sets="batch.prompts=8", to_nodes="advantage").plan()
    assert set(one.graph.nodes) == set(other.graph.nodes) == {"rollout", "reward", "advantage"}
    assert one.document.batch.prompts == other.document.batch.prompts == 8

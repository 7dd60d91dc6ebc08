"""What SingleStream computes, and what every node owes the engine."""

from pathlib import Path

import numpy as np
import pytest
from single_stream import SingleStream

import flowrl
from flowrl import Prompt, Rows, Sample, Token
from flowrl.metrics import collect
from flowrl.testing import check_node, run_node, toy_context


def ready(**settings: float) -> SingleStream:
    """A node as a worker has it, before its first batch."""
    node = SingleStream(**settings)
    node.setup(toy_context(node))
    return node


def advantages(node: SingleStream, prompts: list[str], rewards: list[float | None]) -> list[float]:
    """Of the first tokens of responses of two, the second of which a tool wrote; each prompt is a group of its own."""
    rows = Rows.of(f"u{i}" for i in range(len(prompts)))
    mask = Token.of(rows, [[True, False]] * len(rows), "bool")
    out = node.run(Prompt(rows, prompts), Sample(rows, rewards), mask)
    assert [row.tolist() for row in out.loss_mask.jagged] == [[reward is not None, False] for reward in rewards]
    assert all(second == 0 for _, second in out.advantages.jagged)
    return [float(first) for first, _ in out.advantages.jagged]


def test_a_reward_is_compared_with_what_its_prompt_earned_before() -> None:
    node = ready(rho=0.5, start=0.5)  # a new prompt has the weight of two responses
    assert advantages(node, ["a", "b"], [1.0, 0.0]) == pytest.approx([1.0, -1.0])
    # a: n = 0.5 * 2 + 1 = 2, v = (1 * 0.5 + 1) / 2 = 0.75; b: v = 0.25
    distance = np.array([1 - 0.75, 1 - 0.25])
    expected = (distance - distance.mean()) / distance.std()
    assert advantages(node, ["a", "b"], [1.0, 1.0]) == pytest.approx(expected)


def test_it_is_the_mean_of_the_beta_distribution_of_the_paper() -> None:
    node, alpha, beta = ready(rho=0.875, start=0.25), 2.0, 6.0
    for reward in (1.0, 0.0, 1.0, 1.0):
        advantages(node, ["a", "b"], [reward, 0.0])
        alpha, beta = 0.875 * alpha + reward, 0.875 * beta + 1 - reward
        assert node.state()["tracked"]["a"] == pytest.approx((alpha + beta, alpha / (alpha + beta)))


def test_two_groups_with_the_same_prompt_learn_together_and_in_any_order() -> None:
    one, two = ready(), ready()
    forwards = advantages(one, ["a", "a", "b"], [1.0, 0.0, 1.0])
    assert advantages(two, ["b", "a", "a"], [1.0, 0.0, 1.0]) == pytest.approx(forwards[::-1])
    assert one.state() == two.state()
    assert one.state()["tracked"]["a"] == pytest.approx((0.9 * 10 + 2, (0.9 * 10 * 0.5 + 1) / 11))


def test_what_is_unscored_counts_for_nothing() -> None:
    node = ready()
    with collect() as report:
        assert advantages(node, ["a", "b", "c"], [1.0, 0.0, None]) == pytest.approx([1.0, -1.0, 0.0])
    assert report.metrics["reward/mean"].value == 0.5
    assert set(node.state()["tracked"]) == {"a", "b"}
    assert advantages(node, ["a", "b"], [None, None]) == [0.0, 0.0]


def test_a_batch_that_tells_nothing_gives_exactly_0() -> None:
    assert advantages(ready(start=0.3), ["a", "b", "c"], [0.1, 0.1, 0.1]) == [0.0, 0.0, 0.0]


def test_chat_messages_are_prompts_too() -> None:
    rows = Rows.of(["A", "B"])
    chats = [[{"role": "user", "content": text}] for text in "ab"]
    mask = Token.of(rows, [[True], [True]], "bool")
    out = run_node(SingleStream(), prompt=Prompt(rows, chats), reward=Sample(rows, [1.0, 0.0]), response_mask=mask)
    assert out.advantages.values.tolist() == [1.0, -1.0]


def test_a_memory_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="rho"):
        SingleStream(rho=1.0)


def test_it_keeps_what_every_node_owes_the_engine() -> None:
    assert "goes on from its state" in check_node(SingleStream)


def test_the_pipeline_has_no_problem() -> None:
    assert flowrl.load(Path(__file__).with_name("single_stream.yaml")).check() == ()


def test_a_run_goes_on_from_a_checkpoint_with_what_it_remembered(tmp_path: Path) -> None:
    settings = ["batch.prompts=16", "nodes.actor_update.minibatch=8", "data.train.high=3", "run.steps=3"]
    settings += [f"run.dir={tmp_path}", "checkpoint.every=1", "tracking=null"]
    pipeline = flowrl.load(Path(__file__).with_name("single_stream.yaml"), settings)
    whole = pipeline.run(local=True, quiet=True)
    again = pipeline.run(local=True, quiet=True, resume=whole.folder / "checkpoints" / "step_2")
    assert again.folder == whole.folder, "it went on, and did not start anew"
    same = ("reward/mean", "single_stream/expected", "single_stream/prompts", "actor/grad_norm")
    assert [again.metrics[-1][name] for name in same] == [whole.metrics[-1][name] for name in same]
    assert whole.metrics[-1]["single_stream/prompts"] == 9

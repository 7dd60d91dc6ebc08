"""`advantage.*` against an independent implementation, worked values and the departures that are on purpose."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from flowrl.batch import Prompt, Sample, Token
from flowrl.metrics import collect
from flowrl.node import Node
from flowrl.nodes._backend.returns import Steps, whitened
from flowrl.registry import find
from flowrl.rows import Rows, offsets_of

ORACLE = json.loads((Path(__file__).parents[2] / "data" / "core_algorithms.json").read_text())
GIVEN = ORACLE["inputs"]
ENTRIES: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {}),
    "grpo_no_std (Dr. GRPO)": ("grpo", {"normalize": "none"}),
    "rloo": ("rloo", {}),
    "opo": ("opo", {}),
    "grpo_passk": ("grpo_passk", {}),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", {}),
    "reinforce_plus_plus gamma=1.0": ("reinforce_plus_plus", {"gamma": 1.0}),
    "reinforce_plus_plus gamma=0.9": ("reinforce_plus_plus", {"gamma": 0.9}),
    "gae gamma=1.0 lam=1.0 (whitened over the mask)": ("gae", {"gamma": 1.0, "lam": 1.0}),
    "gae gamma=0.99 lam=0.95 (whitened over the mask)": ("gae", {"gamma": 0.99, "lam": 0.95}),
}
OF_REWARDS = ["grpo", "rloo", "opo", "grpo_passk", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
COMPARING = [name for name in OF_REWARDS if name != "reinforce_plus_plus"]


def made(name: str, **settings: Any) -> Node:
    return find(f"advantage.{name}", Path()).load()(**settings)


def out_of(name: str, rewards: Any, uids: Any, masks: Any = None, **settings: Any) -> Any:
    """The node's output; `values` are 0 and responses have one token unless said otherwise."""
    rows = uids if isinstance(uids, Rows) else Rows.of(uids)
    mask = Token[bool].of(rows, masks or [[True]] * len(rows), "bool")
    columns = {"reward": Sample[float](rows, rewards), "response_mask": mask}
    for port in ("values", "token_rewards"):
        if port in settings or (port == "values" and name == "gae"):
            columns[port] = Token.of(rows, settings.pop(port, [[0.0] * len(row) for row in mask.jagged]), "float")
    return made(name, **settings).run(**columns)  # type: ignore[attr-defined]


def advantages(*args: Any, **settings: Any) -> list[float]:
    found: list[float] = out_of(*args, **settings).advantages.values.tolist()
    return found


def test_every_entry_is_compared() -> None:
    assert set(ENTRIES) == set(ORACLE["advantage"])


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_independent_implementation_agrees(entry: str) -> None:
    name, settings = ENTRIES[entry]
    given = {"values": GIVEN["values"]} if name == "gae" else {}
    out = out_of(name, GIVEN["reward"], GIVEN["uid"], GIVEN["response_mask"], **given, **settings)
    theirs = ORACLE["advantage"][entry]
    expected = np.concatenate(theirs["advantages"] if isinstance(theirs, dict) else theirs)
    assert np.allclose(out.advantages.values, expected, atol=1e-5)
    assert out.loss_mask.values.tolist() == np.concatenate(GIVEN["response_mask"]).tolist()
    if name == "gae":
        assert np.allclose(out.returns.values, np.concatenate(theirs["returns"]), atol=1e-5)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_returns_agree_too(gamma: float) -> None:
    mask = Token[bool].of(Rows.of(GIVEN["uid"]), GIVEN["response_mask"], "bool")
    steps = Steps.of(mask)
    found = steps.per_token(steps.discounted(steps.rewards(np.array(GIVEN["reward"])), gamma))
    expected = np.concatenate(ORACLE["advantage"][f"reinforce_plus_plus gamma={gamma}"]["returns"])
    assert np.allclose(found.values, expected, atol=1e-5)


def test_leave_one_out_is_the_distance_from_the_mean_of_the_others() -> None:
    assert advantages("rloo", [1.0, 0.0, 3.0, 5.0], "aaab") == pytest.approx([-0.5, -2.0, 2.5, 0.0])
    rloo = np.array(advantages("rloo", [1.0, 0.0, 3.0], "aaa"))
    settings = {"baseline": "leave_one_out"}
    assert np.allclose(advantages("grpo", [1.0, 0.0, 3.0], "aaa", normalize="none", **settings), rloo)
    std = np.std([1.0, 0.0, 3.0], ddof=1) + 1e-6
    assert np.allclose(advantages("grpo", [1.0, 0.0, 3.0], "aaa", **settings), rloo / std)


def test_the_optimal_baseline_counts_all_that_a_session_wrote() -> None:
    rows = Rows(["a"], [0, 0, 0], [0, 1, 0], [0, 0, 1])  # session 0 has two outputs, of 1 and 2 tokens
    out = out_of("opo", [9.0, 0.0, 1.0], rows, [[True], [True, False], [True, True]])
    assert out.advantages.values == pytest.approx([0.25, -0.75, 0.0, 0.25, 0.25])  # baseline 3/4


def test_only_the_best_session_has_its_lead() -> None:
    assert advantages("grpo_passk", [1.0, 4.0, 3.0, 7.0, 7.0, 0.0], "aaabbb", normalize="none") == [0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("name", OF_REWARDS)
def test_an_unscored_row_changes_nobody_and_is_out_of_the_loss(name: str) -> None:
    masks = [[True, True], [True, False, True], [True, True], [True], [True], [True]]
    out = out_of(name, [1.0, None, 0.0, 0.5, 0.25, None], "aaabbb", masks)
    alone = out_of(name, [1.0, 0.0, 0.5, 0.25], "aabb", [masks[i] for i in (0, 2, 3, 4)])
    found = list(out.advantages.jagged)
    assert np.allclose(np.concatenate([found[i] for i in (0, 2, 3, 4)]), alone.advantages.values)
    assert [found[1].tolist(), found[5].tolist()] == [[0, 0, 0], [0]]
    assert [row.any() for row in out.loss_mask.jagged] == [True, False, True, True, True, False]


@pytest.mark.parametrize("name", COMPARING)
def test_groups_of_one_or_of_equal_rewards_give_exactly_zero_and_are_counted(name: str) -> None:
    with collect() as report:
        found = advantages(name, [0.7] * 8 + [5.0, 1.0, 0.0], "a" * 8 + "bcc")
    assert found[:9] == [0.0] * 9
    assert np.abs(found[9:]).max() > 0
    assert report.metrics["groups/no_signal"].value == 2
    assert report.metrics["groups/single"].value == 1
    assert {"reward/mean", "reward/std", "advantage/abs"} <= report.metrics.keys()


def test_groups_without_a_signal_are_those_whose_advantages_are_all_zero_whatever_is_compared() -> None:
    rows = Rows.of("aabbcc")
    reward, mask = Sample(rows, [1.0, 1.0, 0.5, 0.5, 1.0, 0.0]), Token.of(rows, [[True]] * 6, "bool")
    with collect() as remax:
        made("remax").run(reward, Prompt[float](rows, [0.0, 0.5, 0.5]), mask)  # type: ignore[attr-defined]
    with collect() as best:
        advantages("grpo_passk", [1.0, 1.0, 0.0, 1.0, 0.0, 0.0], "aaabbb")
    with collect() as alone:
        advantages("reinforce_plus_plus", [1.0, 0.0, 0.0], "abc")
    assert [report.metrics["groups/no_signal"].value for report in (remax, best)] == [1, 1]
    assert "groups/no_signal" not in alone.metrics


def test_a_batch_of_equal_returns_is_whitened_to_exactly_zero() -> None:
    assert advantages("reinforce_plus_plus", [0.7] * 7, "a" * 7) == [0.0] * 7
    assert advantages("gae", [0.7] * 7, "a" * 7) == [0.0] * 7
    assert whitened(np.array([3.0])).tolist() == [0.0]
    assert whitened(np.zeros(0)).tolist() == []


def test_credit_passes_over_an_observation_undiscounted() -> None:
    out = out_of("gae", [1.0], "a", [[True, False, True]], gamma=0.5, lam=1.0, whiten=False)
    assert out.returns.values.tolist() == [0.5, 0.0, 1.0]


def test_a_reward_at_a_masked_end_moves_to_the_last_trainable_token() -> None:
    out = out_of("gae", [1.0], "a", [[True, True, False, False]], gamma=0.5, lam=1.0, whiten=False)
    assert out.advantages.values.tolist() == [0.5, 1.0, 0.0, 0.0]


def test_token_rewards_take_the_place_of_the_reward_and_none_is_lost() -> None:
    masks = [[False, True, False, True, False], [False, False], [True]]
    rewards = [[1.0, 2.0, 4.0, 8.0, 16.0], [32.0, 64.0], [128.0]]
    settings = {"gamma": 1.0, "lam": 1.0, "whiten": False, "token_rewards": rewards}
    out = out_of("gae", [5.0, 5.0, None], "aaa", masks, **settings)
    assert out.returns.values.tolist() == [0, 31, 0, 24, 0, 0, 0, 0]
    with_tokens = advantages("reinforce_plus_plus", [9.0, 9.0], "ab", token_rewards=[[1.0], [3.0]])
    assert with_tokens == pytest.approx(advantages("reinforce_plus_plus", [1.0, 3.0], "ab"))


def test_what_a_critic_says_of_an_observation_is_not_read() -> None:
    for noise in (0.0, np.nan):
        values = [[1.0, noise, 3.0]]
        out = out_of("gae", [1.0], "a", [[True, False, True]], values=values, gamma=0.5, lam=0.0, whiten=False)
        assert out.advantages.values.tolist() == [0.5, 0.0, -2.0]
        assert out.returns.values.tolist() == [1.5, 0.0, 1.0]


def test_lam_0_trusts_the_critic_and_1_the_reward() -> None:
    masks, values = [[True] * 3], [[0.5, 0.25, 1.0]]
    settings = {"masks": masks, "values": values, "whiten": False}
    assert advantages("gae", [2.0], "a", lam=0.0, **settings) == [-0.25, 0.75, 1.0]
    assert advantages("gae", [2.0], "a", lam=1.0, **settings) == [1.5, 1.75, 1.0]


def multi(rewards: list[Any], uids: str, **settings: Any) -> Any:
    rows = Rows.of(uids)
    mask = Token(rows, np.ones(len(rows), np.bool_), np.arange(len(rows) + 1))
    return made("multi_reward", **settings).run(  # type: ignore[attr-defined]
        rewards=[Sample[float](rows, reward) for reward in rewards], response_mask=mask
    )


def test_rewards_are_compared_one_by_one_and_then_added_up() -> None:
    right, short = [1.0, 0.0, 0.0, 1.0], [-10.0, -30.0, -20.0, -20.0]
    apart = [np.array(advantages("grpo", reward, "aabb")) for reward in (right, short)]
    assert np.allclose(multi([right, short], "aabb").advantages.values, apart[0] + apart[1])
    found = multi([right, short], "aabb", coefficients=[1.0, 0.5]).advantages.values
    assert np.allclose(found, apart[0] + 0.5 * apart[1])
    whitened_ = multi([right, short], "aabb", coefficients=[1.0, 0.5], whiten=True).advantages.values
    assert np.allclose(whitened_, found / np.std(found, ddof=1))


def test_rewards_that_cancel_in_a_sum_tell_something_apart() -> None:
    with collect() as report:
        found = multi([[1.0, 0.0, 0.0, 2.0], [0.0, 1.0, 0.0, 0.0]], "aabb", coefficients=[2.0, 1.0])
    assert np.abs(found.advantages.values[:2]).min() > 0.7
    assert report.metrics["groups/no_signal"].value == 0
    with collect() as report:
        found = multi([[1.0, 0.0, 0.3, 0.3], [0.0, 1.0, 0.0, 0.0]], "aabb", whiten=True, coefficients=[2.0, 1.0])
    assert found.advantages.values[2:].tolist() == [0.0, 0.0]
    assert report.metrics["groups/no_signal"].value == 1


def test_a_session_without_one_of_its_rewards_is_unscored() -> None:
    out = multi([[1.0, 0.0, 0.0], [None, 1.0, 0.0]], "aaa")
    assert out.loss_mask.values.tolist() == [False, True, True]
    assert np.allclose(out.advantages.values, [0.0, *np.array(advantages("grpo", [1.0, 0.0], "aa"))])


def test_a_reward_is_compared_with_the_baseline_of_its_prompt() -> None:
    rows = Rows.of("abaccb")
    mask = Token[bool].of(rows, [[True, False], [True], [True], [True], [True], [True]])
    given = {"reward": Sample[float](rows, [1.0, 0.5, 0.0, 1.0, 2.0, None]), "response_mask": mask}  # type: ignore[list-item]
    with collect() as report:
        out = made("remax").run(baseline=Prompt[float](rows, [0.25, 0.5, None]), **given)  # type: ignore[attr-defined]
    assert out.advantages.values.tolist() == [0.75, 0.0, 0.0, -0.25, 0.0, 0.0, 0.0]
    assert out.loss_mask.values.tolist() == [True, False, True, True, False, False, False]
    assert report.metrics["reward/unscored"].value == 3
    assert report.metrics["reward/baseline"].value == pytest.approx(0.375)


def test_a_baseline_is_the_mean_of_what_was_scored() -> None:
    rows = Rows.of("abac")
    out = find("reward.baseline", Path()).load()().run(Sample[float](rows, [1.0, 0.5, 0.0, None]))  # type: ignore[attr-defined, list-item]
    assert out.baseline.values[:2].tolist() == [0.5, 0.5]
    assert np.isnan(out.baseline.values[2])


def distilled(**settings: Any) -> Any:
    rows = Rows.of("ab")
    mask = Token[bool].of(rows, [[True, False, True], [True]])
    student = Token[float].of(rows, [[-1.0, np.nan, -5.0], [-2.0]])
    teacher = Token[float].of(rows, [[-2.0, 0.0, -1.0], [-2.0]])
    reward = Token[float].of(rows, [[1.0, 0.0, 1.0], [-1.0]])
    given = {"reward_advantages": reward} if settings.get("reward_coef") else {}
    return made("reverse_kl", **settings).run(  # type: ignore[attr-defined]
        response_mask=mask, old_log_probs=student, teacher_log_probs=teacher, **given
    )


def test_a_token_that_the_teacher_likes_better_has_an_advantage() -> None:
    with collect() as report:
        out = distilled()
    assert out.advantages.values.tolist() == [-1.0, 0.0, 4.0, 0.0]
    assert out.loss_mask.values.tolist() == [True, False, True, True]
    assert report.metrics["distill/reverse_kl"].value == pytest.approx(-1.0)
    assert distilled(coef=0.5, clip=2.0).advantages.values.tolist() == [-0.5, 0.0, 1.0, 0.0]
    assert distilled(reward_coef=0.5).advantages.values.tolist() == [-0.5, 0.0, 4.5, -0.5]


@pytest.mark.parametrize("name", ["grpo", "grpo_passk", "multi_reward"])
def test_an_epsilon_without_a_division_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="epsilon has no effect with normalize: none"):
        made(name, normalize="none", epsilon=1e-3)


@pytest.mark.parametrize("name", [*OF_REWARDS, "gae"])
def test_a_hundred_thousand_trajectories_take_well_under_a_second(name: str) -> None:
    rng = np.random.default_rng(0)
    rows = Rows([str(g) for g in range(12_500)], np.repeat(np.arange(12_500), 8), np.tile(np.arange(8), 12_500))
    offsets = offsets_of(rng.integers(1, 16, len(rows)))
    mask = Token(rows, rng.random(offsets[-1]) < 0.9, offsets)
    columns = {"reward": Sample(rows, rng.random(len(rows))), "response_mask": mask}
    if name == "gae":
        columns["values"] = Token(rows, rng.random(offsets[-1]), offsets)
    start = time.perf_counter()
    made(name).run(**columns)  # type: ignore[attr-defined]
    assert time.perf_counter() - start < 0.8

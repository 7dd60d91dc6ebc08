"""The settings of a policy's loss: each matters or is refused, and a user's own loss is known before launch."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

import flowrl
from flowrl.nodes._backend.loss_choice import LOSSES
from flowrl.nodes._backend.objective import SETTINGS
from flowrl.nodes._backend.terms import Aggregation
from flowrl.nodes.update.policy import Policy

DEFAULT = Path(__file__).parents[3] / "pipelines" / "grpo_sync.yaml"
SMOOTH = """
from __future__ import annotations
from typing import TYPE_CHECKING, Literal
if TYPE_CHECKING:
    from torch import Tensor

def smooth(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor,
           power: float = 1.0, sign: Literal["plus", "minus"] = "minus") -> Tensor:
    loss = (log_probs - old_log_probs).exp() ** power * advantages
    return loss if sign == "plus" else -loss
"""


def refusal(**settings: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        Policy(minibatch=1, **settings)
    return str(caught.value.errors()[0]["msg"])


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], str]:
    """Writes a file with a loss called `mine`, and names it."""

    def write(text: str) -> str:
        (tmp_path / "losses.py").write_text(f"from torch import Tensor\n{text}\n")
        return f"{tmp_path}/losses.py:mine"

    return write


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("key", SETTINGS)
def test_a_loss_takes_its_settings_and_refuses_those_of_others(loss: str, key: str) -> None:
    value = 5.0 if key == "dual_clip" else 0.25
    if key in LOSSES[loss].settings:
        assert Policy(minibatch=1, loss=loss, **{key: value})._given() == {key: value}
    else:
        assert f"{key} has no effect with loss: {loss}" in refusal(loss=loss, **{key: value})


def test_a_loss_with_one_value_for_a_trajectory_takes_one_aggregation() -> None:
    chosen: dict[str, Aggregation] = {name: Policy(minibatch=1, loss=name)._aggregation for name in LOSSES}
    assert {name for name, mode in chosen.items() if mode == "token-mean"} == {"clip", "cispo", "gpg", "reinforce"}
    assert {chosen[name] for name in ("gspo", "sapo", "geo_mean")} == {"seq-mean-token-mean"}
    assert Policy(minibatch=1, loss="gspo", aggregation="token-mean")._aggregation == "token-mean"
    for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"):
        assert f"{mode} would weigh it by its length" in refusal(loss="geo_mean", aggregation=mode)


@pytest.mark.parametrize("kind", ["k1", "k2", "abs", "k1+", "k3+"])
def test_an_estimator_that_nothing_weighs_is_refused(kind: str) -> None:
    assert "kl has no effect with kl_coef: 0" in refusal(kl=kind)
    assert Policy(minibatch=1, kl=kind, kl_coef=0.1).kl == kind


def test_the_dual_clip_must_lie_above_the_clip() -> None:
    assert "above 1 + clip_high = 1.5, not 1.4" in refusal(clip_high=0.5, dual_clip=1.4)
    assert "above 1 + clip_high = 3.5, not 3" in refusal(clip_high=2.5)
    Policy(minibatch=1, loss="cispo", clip_high=2.5)


def test_a_loss_reads_the_older_policy_if_it_names_it() -> None:
    assert Policy(minibatch=1, loss="gpg").needs() == {
        "ref_log_probs": False, "max_tokens": False, "old_log_probs": False,
    }  # fmt: skip
    assert Policy(minibatch=1, epochs=2, loss="gpg").refuses({}, 4, 1) == ""
    for loss in LOSSES.keys() - {"gpg"}:
        assert "old_log_probs" not in Policy(minibatch=1, loss=loss).needs()
        assert "need old_log_probs" in Policy(minibatch=1, epochs=2, loss=loss).refuses({}, 4)


def test_a_loss_of_ones_own_takes_its_options_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "smooth.py").write_text(SMOOTH)
    name = f"{tmp_path}/smooth.py:smooth"
    columns = {key: torch.full((2,), value) for key, value in (("log_probs", -1.0), ("old_log_probs", -2.0))}
    columns |= {"advantages": torch.tensor([1.0, 2.0]), "mask": torch.ones(2, dtype=torch.bool)}

    def loss(**options: Any) -> list[float]:
        node = Policy(minibatch=1, loss=name, loss_options=options)
        found: list[float] = node._loss(columns, node._given())[0].tolist()
        return found

    ratio = torch.tensor(1.0).exp().item()
    assert loss() == pytest.approx([-ratio, -2 * ratio])
    assert loss(power=2.0, sign="plus") == pytest.approx([ratio**2, 2 * ratio**2])
    for options, fact in (
        ({"pwoer": 2.0}, "smooth() has no setting 'pwoer'"),
        ({"advantages": 2.0}, "smooth() has no setting 'advantages'"),
        ({"power": "2"}, "'power' is float, not '2'"),
        ({"power": True}, "'power' is float, not True"),
        ({"power": float("nan")}, "'power' is a finite number, not nan"),
        ({"sign": "minsu"}, """'sign' is Literal["plus", "minus"], not 'minsu'"""),
    ):
        assert fact.replace('"', "'") in refusal(loss=name, loss_options=options).replace('"', "'")
    assert "clip_low has no effect with loss: " in refusal(loss=name, clip_low=0.1)
    assert "loss: clip takes no loss_options" in refusal(loss_options={"power": 2.0})


@pytest.mark.parametrize(
    ("definition", "fact"),
    [
        ("def mine(advantages: Tensor): ...", "does not take log_probs, so nothing would train"),
        ("def mine(log_probs): ...", "takes 'log_probs', a column, as something else than a Tensor without a default"),
        ("def mine(log_probs: float): ...", "takes 'log_probs', a column, as something else than a Tensor"),
        ("def mine(log_probs: Tensor, mask: Tensor = None): ...", "takes 'mask', a column, as something else"),
        ("def mine(log_probs: Tensor, advantage: Tensor): ...", "takes 'advantage', which is no column, and has no"),
        ("def mine(log_probs: Tensor, beta=0.1): ...", "takes 'beta' without saying its type"),
        ("def mine(log_probs: Tensor, beta: float = 'x'): ...", "is none: 'beta' is float, not 'x'"),
        ("def mine(log_probs: Tensor, beta: Tensor = None): ...", "'beta', whose type Tensor YAML cannot write"),
        ("def mine(log_probs: Tensor, beta: 'Gone' = 1): ...", "'beta', whose type Gone YAML cannot write"),
        ("def mine(log_probs: Tensor, *more: Tensor): ...", "takes 'more' by no name"),
        ("def mine(log_probs: Tensor, **more: float): ...", "takes 'more' by no name"),
        ("def mine(log_probs: Tensor) -> float: ...", "says that it returns float, no Tensor"),
        ("def mine(log_probs: Tensor) -> 'list[float]': ...", "says that it returns list[float], no Tensor"),
        ("def mine(log_probs: Tensor) -> None: ...", "says that it returns None, no Tensor"),
        ("async def mine(log_probs: Tensor) -> Tensor: ...", "is an async function, no plain function"),
        ("def mine(log_probs: Tensor) -> Tensor: yield log_probs", "is a generator, no plain function"),
        ("class mine:\n    def __init__(self, log_probs: Tensor): ...", "is a class, no plain function"),
        ("mine = max", "Python does not say what"),
        ("mine = 3", "is no function, but int"),
        ("def other(): ...", "has no function 'mine'"),
        ("import gone", "No module named 'gone'"),
    ],
)
def test_a_loss_that_cannot_be_called_is_refused(written: Callable[[str], str], definition: str, fact: str) -> None:
    assert fact in refusal(loss=written(definition))


@pytest.mark.parametrize(
    "said", ["Tensor", "'Tensor'", "tuple[Tensor, Tensor]", "'tuple[Tensor, Tensor | None]'", "Pair"]
)
def test_a_loss_may_say_that_it_returns_one_tensor_or_two(written: Callable[[str], str], said: str) -> None:
    pair = "from typing import NamedTuple\nclass Pair(NamedTuple):\n    loss: Tensor\n    clipped: Tensor\n"
    assert Policy(minibatch=1, loss=written(f"{pair}def mine(log_probs: Tensor) -> {said}: ..."))


def test_the_loss_of_the_page_is_right(tmp_path: Path) -> None:
    page = (DEFAULT.parents[1] / "docs" / "losses.md").read_text()
    code, line = re.findall(r"```(?:python|yaml)\n(.*?)```", page, re.S)[1:]
    (tmp_path / "my_losses.py").write_text(code)
    (tmp_path / "mine.yaml").write_text(f"extends: {DEFAULT}\n{line}")
    assert not flowrl.load(tmp_path / "mine.yaml").check()


@pytest.mark.parametrize("hint", ["Tensor", "'Tensor'", "'torch.Tensor'", "torch.Tensor"])
def test_types_may_be_written_as_text(written: Callable[[str], str], hint: str) -> None:
    name = written(f"import torch\ndef mine(log_probs: {hint}, beta: 'float' = 1.0): ...")
    assert Policy(minibatch=1, loss=name, loss_options={"beta": 2.0})._given() == {"beta": 2.0}
    assert "'beta' is float, not 'x'" in refusal(loss=name, loss_options={"beta": "x"})


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("(log_probs * 2).sum()", "a tensor of shape ()"),
        ("1.0", "float"),
        ("(log_probs, log_probs.sum())", "a tensor of shape ()"),
        ("(log_probs, None, None)", "tuple"),
    ],
)
def test_a_loss_that_does_not_return_one_value_for_each_token_is_told_so(
    written: Callable[[str], str], body: str, what: str
) -> None:
    node = Policy(minibatch=1, loss=written(f"def mine(log_probs: Tensor): return {body}"))
    columns = {"log_probs": torch.zeros(3), "mask": torch.ones(3, dtype=torch.bool)}
    said = f"mine() returned {what}, not one of shape (3,): a value for each token"
    with pytest.raises(ValueError, match=re.escape(said)):
        node._loss(columns, {})


def test_a_file_of_losses_starts_at_the_folder_of_its_yaml(tmp_path: Path) -> None:
    (tmp_path / "smooth.py").write_text(SMOOTH)
    file = tmp_path / "mine.yaml"
    text = f"extends: {DEFAULT}\nnodes:\n  actor_update:\n    loss: ./smooth.py:smooth\n"
    text += "    loss_options: {power: 1e-1}\n"
    file.write_text(text)
    assert not flowrl.load(file).check()
    file.write_text(text.replace("power", "pover"))
    (problem,) = flowrl.load(file).check()
    assert (problem.code, problem.place.line, problem.fix) == ("FR007", 5, "did you mean 'power'?")


def test_a_value_that_is_refused_makes_no_other_look_wrong(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    for settings in ("kl: k1, kl_coef: -1.0", "loss: gsop, clip_low: 0.0003", "loss: gsop, clip_high: 3.0"):
        file.write_text(f"extends: {DEFAULT}\nnodes:\n  actor_update: {{{settings}}}\n")
        (problem,) = flowrl.load(file).check()
        assert problem.place.path in ("nodes.actor_update.kl_coef", "nodes.actor_update.loss")

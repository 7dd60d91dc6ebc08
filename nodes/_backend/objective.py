"""What a policy update minimises: a policy loss by name, a divergence from a reference, and an entropy.

L = policy + kl_coef * KL - entropy_coef * entropy; the three share mask, aggregation and denominator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, field_validator, model_validator

from flowrl.errors import nearest
from flowrl.metrics import metric
from flowrl.model import SettingError
from flowrl.nodes._backend.loss_choice import LOSSES, PolicyLoss, loss_of, misfit
from flowrl.nodes._backend.terms import Aggregation, KlKind
from flowrl.nodes._backend.updating import Updating

if TYPE_CHECKING:
    from torch import Tensor

SETTINGS = ("clip_low", "clip_high", "dual_clip", "tau_positive", "tau_negative")
"""Settings of single losses, which have defaults of their own."""


class Objective(Updating):
    """Base of the update of a policy: the settings of its loss, and the loss."""

    loss: (
        Literal["clip", "gspo", "cispo", "gpg", "sapo", "geo_mean", "reinforce"]
        | Annotated[str, Field(pattern=r"^.+:[A-Za-z_]\w*$")]
    ) = "clip"
    """Policy loss of a token; or a function of yours, `./my_losses.py:mine` or `my_pkg.losses:mine`."""
    loss_options: dict[str, Any] = Field({})
    """Settings of a loss of yours, by their names there."""
    clip_low: float | None = Field(None, ge=0, le=1)
    """How far the probability ratio may fall below 1 with a gain; null is what the loss has by itself: 0.2 for `clip`,
    3e-4 for `gspo`, 1 (no bound) for `cispo`, 0.4 of the logarithm for `geo_mean`."""
    clip_high: float | None = Field(None, ge=0)
    """How far it may rise above 1 with a gain; null is 0.2 for `clip`, 4e-4 for `gspo`, 4 for `cispo`, 0.4 of the
    logarithm for `geo_mean`."""
    dual_clip: float | None = Field(None, gt=1)
    """`clip`: largest loss of a token with a negative advantage, in multiples of the advantage; null is 3."""
    tau_positive: float | None = Field(None, gt=0)
    """`sapo`: how fast a token's weight fades as its ratio leaves 1, where the advantage is positive; null is 1."""
    tau_negative: float | None = Field(None, gt=0)
    """`sapo`: the same where it is not positive; null is 1.05."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the divergence from the reference; at 0, `ref_log_probs` is not read."""
    kl: KlKind = "k3"
    """Estimator of that divergence; with a `+` its value, and the gradient of `k2`, which is that of the divergence."""
    entropy_coef: float = 0.0
    """Weight of the entropy; a positive one raises it."""
    aggregation: Aggregation | None = None
    """How the losses of tokens become one number; null is the mean over tokens, but the mean over trajectories of the
    means over their tokens for `gspo`, `sapo` and `geo_mean`, which takes no other."""

    _loss: PolicyLoss = PrivateAttr()

    @field_validator("loss")
    @classmethod
    def _can_be_used(cls, loss: str) -> str:
        loss_of(loss)
        return loss

    @model_validator(mode="after")
    def _every_setting_counts(self) -> Self:
        # Now: the text of a user's file travels beside the parameters, and is there only while they are read.
        self._loss = loss_of(self.loss)
        for key in SETTINGS:
            if getattr(self, key) is not None and (self._is_own or key not in self._loss.settings):
                users = " or ".join(name for name, loss in LOSSES.items() if key in loss.settings)
                own = f"loss_options: {{{key}: ...}}" if key in self._loss.settings else f"loss: {users}"
                raise SettingError(
                    (key, "loss"), f"{key} has no effect with loss: {self.loss}", f"{own}; or {key}: null"
                )
        if self.kl != type(self).model_fields["kl"].default and not self.kl_coef:
            raise SettingError(("kl", "kl_coef"), "kl has no effect with kl_coef: 0", "kl_coef: 0.001, or leave kl out")
        return self

    @model_validator(mode="after")
    def _own_settings_are_its_own(self) -> Self:
        if self.loss_options and not self._is_own:
            fact = f"loss: {self.loss} takes no loss_options, which are those of a loss of yours"
            fix = f"write {' and '.join(own)} beside loss" if (own := self._loss.settings) else "loss_options: null"
            raise SettingError(("loss_options", "loss"), fact, fix)
        for option, value in self.loss_options.items():
            if option not in self._loss.settings:
                fact = f"{self.loss.rpartition(':')[2]}() has no setting '{option}'"
                raise SettingError("loss_options", fact, nearest(option, self._loss.settings) or "it has none at all")
            if wrong := misfit(self.loss, self._loss.function, option, value):
                default = self._loss.settings[option]
                raise SettingError("loss_options", wrong, f"{option}: {default}, its default, or another one")
        return self

    @model_validator(mode="after")
    def _dual_clip_lies_above_the_clip(self) -> Self:
        used = {**self._loss.settings, **self._given()}
        if self.loss == "clip" and used["dual_clip"] <= (bound := 1 + used["clip_high"]):
            fact = f"dual_clip must be above 1 + clip_high = {bound:g}, not {used['dual_clip']:g}"
            raise SettingError(("dual_clip", "clip_high", "loss"), fact, f"dual_clip: {bound + 1:g}")
        return self

    @model_validator(mode="after")
    def _loss_takes_the_aggregation(self) -> Self:
        if self._aggregation not in (allowed := self._loss.aggregations):
            fact = (
                f"loss: {self.loss} has one value for a trajectory, not one for each token: {self.aggregation} would "
            )
            fix = f"aggregation: {allowed[0]}, or leave it out"
            raise SettingError(("aggregation", "loss"), fact + "weigh it by its length", fix)
        return self

    @property
    def _is_own(self) -> bool:
        return self.loss not in LOSSES

    @property
    def _aggregation(self) -> Aggregation:
        return self.aggregation or self._loss.aggregation

    def _given(self) -> Mapping[str, Any]:
        """The settings of the loss that are not its defaults."""
        if self._is_own:
            return self.loss_options
        return {key: value for key in SETTINGS if (value := getattr(self, key)) is not None}

    def needs(self) -> dict[str, bool]:
        norm = self._aggregation == "seq-mean-token-sum-norm"
        unread = {} if "old_log_probs" in self._loss.parameters else {"old_log_probs": False}
        return {"ref_log_probs": self.kl_coef > 0, "max_tokens": norm, **unread}

    def _objective(self, columns: Mapping[str, Tensor], divisor: float) -> Tensor:
        """The share of these tokens in the mini-batch's loss; all columns (T,) are 0 outside the mask.

        `columns` are those of a policy loss, `entropy`, and where they are read `ref_log_probs`, `importance_weights`.
        """
        from flowrl.nodes._backend.losses import aggregate, kl

        mask, row, entropy = columns["mask"], columns["row"], columns["entropy"]

        def total(values: Tensor) -> Tensor:
            return aggregate(values, row, mask, self._aggregation, divisor)

        policy, clipped = self._loss(columns, self._given(), columns.get("importance_weights"))
        loss = pg_loss = total(policy)
        num_tokens = float(mask.sum())
        if self.kl_coef > 0:
            divergence, clamped = kl(columns["log_probs"], columns["ref_log_probs"], self.kl)
            kl_loss = total(divergence)
            loss = loss + self.kl_coef * kl_loss
            metric("actor/kl_loss", kl_loss.item(), 0.0)
            metric("actor/kl_clamped", float((clamped & mask).sum()), reduce="sum")
        if self.entropy_coef:
            loss = loss - self.entropy_coef * total(entropy)
        metric("actor/loss", loss.item(), 0.0)
        metric("actor/pg_loss", pg_loss.item(), 0.0)
        metric("actor/entropy", entropy.detach().sum().item(), num_tokens)
        if clipped is not None:
            metric("actor/clip_fraction", float((clipped & mask).sum()), num_tokens)
        return loss

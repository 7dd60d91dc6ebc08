"""A model as the document describes it: which weights, whether they train, and with which optimizer."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from flowrl.errors import nearest


class Settings(BaseModel):
    """Base of every section: unknown keys refused, frozen, strict types, no infinity and no NaN."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class SettingError(ValueError):
    """Raised by a validator for values that do not go together: their keys, the one to change first, and to what.

    It is shown at the one that was written last: one of the user's file, not of the file which that extends.
    """

    def __init__(self, keys: str | Sequence[str], fact: str, fix: str = "") -> None:
        super().__init__(fact)
        self.keys, self.fix = (keys,) if isinstance(keys, str) else tuple(keys), fix


def default_values(cls: type[BaseModel], only: str = "") -> dict[str, Any]:
    """The defaults of a class as YAML has them, of all settings or of one. Raises what Pydantic does for other values.

    What a factory makes is made anew.
    """
    names = {name for name, field in cls.model_fields.items() if not field.is_required() and only in ("", name)}
    return cls.model_construct().model_dump(mode="json", include=names, warnings=False)


Decay = Annotated[float, Field(ge=0, lt=1)]
OPTIMIZER_PATTERN = r"^(adamw|[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*)$"


class OptimizerSpec(Settings):
    """How a model is trained: its optimizer, the learning rate over the run, and the limit on the gradient norm."""

    type: str = Field("adamw", pattern=OPTIMIZER_PATTERN)
    """`adamw`, or the import path of any torch optimizer, such as `torch.optim:SGD`."""
    lr: float = Field(1.0e-6, gt=0)
    """Learning rate; what it is at most, where a schedule changes it."""
    betas: tuple[Decay, Decay] = Field((0.9, 0.999), strict=False)
    """AdamW: decay of the running means of the gradient and of its square."""
    eps: float = Field(1.0e-8, gt=0)
    """AdamW: added to the denominator of the update."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay of matrices; biases and the weights of norms have none."""
    decay_vectors: bool = False
    """Let biases and the weights of norms, all parameters of fewer than two dimensions, decay too."""
    options: dict[str, Any] = Field({})
    """Further arguments of the optimizer by their names there, such as `momentum: 0.9`."""
    max_grad_norm: float = Field(1.0, gt=0, allow_inf_nan=True)
    """Gradient norm above which gradients are scaled down; `.inf` switches clipping off."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: the same, or falling until the last optimizer step of the run."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps in which the learning rate rises to `lr`."""
    min_lr_rate: float = Field(0.0, ge=0, lt=1)
    """What a falling learning rate ends at, as a share of `lr`."""

    @property
    def import_path(self) -> str:
        """Module and class of the optimizer: `torch.optim:AdamW` of `adamw`."""
        return "torch.optim:AdamW" if self.type == "adamw" else self.type

    @model_validator(mode="after")
    def _options_have_no_key_of_their_own(self) -> Self:
        own = {"lr", "weight_decay"} | ({"betas", "eps"} if self.type == "adamw" else set())
        if doubled := sorted(own & self.options.keys()):
            raise SettingError("options", f"{doubled[0]} has a key of its own beside options", f"{doubled[0]}: ...")
        given = [key for key in ("betas", "eps") if getattr(self, key) != type(self).model_fields[key].default]
        if given and self.type != "adamw":
            fact, value = f"{given[0]} is a setting of adamw", getattr(self, given[0])
            shown = list(value) if isinstance(value, tuple) else value
            raise SettingError((given[0], "type"), fact, f"options: {{{given[0]}: {shown}}}")
        return self

    @model_validator(mode="after")
    def _vectors_decay_where_anything_does(self) -> Self:
        if self.decay_vectors and not self.weight_decay:
            fact = "decay_vectors has no effect with weight_decay: 0"
            raise SettingError(("decay_vectors", "weight_decay"), fact, "weight_decay: 0.01, or decay_vectors: false")
        return self

    @model_validator(mode="after")
    def _only_a_falling_rate_has_a_floor(self) -> Self:
        if self.min_lr_rate and self.schedule == "constant":
            fact = "min_lr_rate is where a falling learning rate ends, and a constant one does not fall"
            raise SettingError(("min_lr_rate", "schedule"), fact, "schedule: cosine")
        return self


ALL_LINEAR = "all-linear"


class LoraSpec(Settings):
    """Train low-rank adapters beside the frozen weights (LoRA, arXiv:2106.09685): W x becomes W x + alpha/r B A x."""

    rank: int = Field(16, ge=1)
    """Inner width of an adapter, `r` in peft."""
    alpha: int = Field(32, ge=1)
    """What an adapter adds is scaled by alpha / rank; `lora_alpha` in peft."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank): high ranks then learn as fast (arXiv:2312.03732); `use_rslora` in peft."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of an adapter's inputs that an update leaves out, and only an update; `lora_dropout` in peft."""
    target_modules: Literal["all-linear"] | list[Annotated[str, Field(min_length=1)]] = "all-linear"
    """Layers that get an adapter: `all-linear` is every linear layer but the output projection; or a list of names,
    such as [q_proj, v_proj]."""

    @model_validator(mode="after")
    def _some_layer_is_meant(self) -> Self:
        if not self.target_modules or self.target_modules == [ALL_LINEAR]:
            fact = "a list names layers, such as [q_proj, v_proj]"
            raise SettingError("target_modules", fact, f"target_modules: {ALL_LINEAR}")
        return self


Head = Literal["lm", "value"]
"""What a model says of a token: how likely each word is that may follow, or what return is to be expected."""
ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
"""Names that transformers knows; beside them it takes kernels of the hub, named like models."""
_KERNEL = re.compile(r"[\w.-]+/[\w.-]+(@[\w.-]+)?(:[\w.-]+)?")


class ModelSpec(Settings):
    """One causal language model."""

    path: str = Field(min_length=1)
    """A shipped name (`arith-tiny`), a fetched one (`smollm2`), a folder, `gguf:FILE.gguf`, or a hub id."""
    revision: str | None = Field(None, min_length=1)
    """Branch, tag or commit of a hub id; null is `main`."""
    tokenizer: str | None = Field(None, min_length=1)
    """Another model to take the tokenizer of, named like `path`; null is the model's own."""
    chat_template: str | None = Field(None, min_length=1)
    """File with a Jinja template, or its text, in the place of the tokenizer's own; null keeps that."""
    head: Head = "lm"
    """What is read off the last hidden states: `lm` log-probabilities of words, `value` the return that a critic
    expects, by one linear layer, which starts at 0 unless the folder is that of a classifier with one label."""
    trainable: bool = False
    """Whether an update node may change the weights."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights in memory."""
    attn_implementation: str | None = Field(None, min_length=1)
    """How transformers computes attention: `eager`, `sdpa`, `flash_attention_2`, ...; null leaves it the choice."""
    trust_remote_code: bool = False
    """Whether Python files that come with the model may be run."""
    parallel: Literal["ddp", "fsdp2"] = "ddp"
    """Over the workers of its pool: a copy of weights and optimizer on each, or a share of them on each."""
    mixed_precision: Literal["bfloat16"] | None = None
    """Type that a trained model computes in; weights, gradients and optimizer stay float32. null computes in that."""
    gradient_checkpointing: bool = False
    """Keep the inputs of layers only, and compute each layer again in the backward pass: less memory, more time."""
    offload: bool = False
    """Keep weights and optimizer in host memory while an engine generates on the same GPU."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """Used when the model is trainable."""
    lora: LoraSpec | None = None
    """Train adapters alone, and leave the weights as they are; null trains all weights."""

    @model_validator(mode="after")
    def _attention_is_possible(self) -> Self:
        asked = self.attn_implementation or ATTENTION[0]
        if asked not in ATTENTION and not _KERNEL.fullmatch(asked):
            fact = f"transformers has no attention called '{asked}'"
            raise SettingError("attn_implementation", fact, nearest(asked, ATTENTION))
        if asked.startswith("flash_") and self.dtype == "float32" and self.mixed_precision is None:
            fact = f"{asked} computes in 16 bits, not in float32"
            narrow = "mixed_precision: bfloat16" if self.trainable else "dtype: bfloat16"
            raise SettingError(("attn_implementation", "dtype"), fact, f"attn_implementation: sdpa, or {narrow}")
        return self

    def same_weights(self, other: ModelSpec) -> bool:
        """Whether both load the same tensors, and compute with them in the same way."""
        keys = ("path", "revision", "head", "dtype", "attn_implementation", "trust_remote_code")
        return all(getattr(self, key) == getattr(other, key) for key in keys)

    @model_validator(mode="after")
    def _adapters_train(self) -> Self:
        if self.lora is not None and not self.trainable:
            fact = "lora says what of a model trains, and this one is frozen"
            raise SettingError(("lora", "trainable"), fact, "trainable: true, or leave lora out")
        return self

    @model_validator(mode="after")
    def _trains_in_a_wide_type(self) -> Self:
        # Adapters are float32 whatever the type of the weights beside them.
        if self.trainable and self.dtype != "float32" and self.lora is None:
            # A step of 1e-6 rounds away in bfloat16, and AdamW's eps of 1e-8 is 0 in float16.
            fix = "dtype: float32, with mixed_precision: bfloat16 to compute in 16 bits"
            raise SettingError(("dtype", "trainable"), f"{self.dtype} is too narrow to train in", fix)
        return self

    @model_validator(mode="after")
    def _only_what_trains_is_told_how(self) -> Self:
        if not self.trainable and self.mixed_precision is not None:
            fact = "mixed_precision keeps weights that train in float32, and this model does not train"
            raise SettingError(("mixed_precision", "trainable"), fact, f"dtype: {self.mixed_precision}")
        if not self.trainable and self.gradient_checkpointing:
            fact = "gradient_checkpointing has no effect: this model does not train"
            raise SettingError(("gradient_checkpointing", "trainable"), fact, "gradient_checkpointing: false")
        return self


def base_of(name: str, models: Mapping[str, ModelSpec], trained: Collection[str]) -> str | None:
    """Which of the models trained beside it *is* this frozen one once its adapter is switched off; None if none is.

    So the reference of a policy that trains with LoRA costs no memory.
    """
    spec = models[name]
    adapted = (other for other in trained if models[other].lora is not None)
    if spec.trainable or spec.head == "value":  # whose head trains beside an adapter
        return None
    return next((other for other in adapted if models[other].same_weights(spec)), None)

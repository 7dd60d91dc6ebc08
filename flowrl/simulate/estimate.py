"""Costs without a run: from the FLOPs and bytes of a plan, and what devices can do. A guess, and called one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flowrl.graph.bind import BoundNode
from flowrl.graph.plan import Plan
from flowrl.graph.show.text import human_flops
from flowrl.graph.sizes.architecture import Architecture
from flowrl.graph.sizes.flops import forward_flops
from flowrl.graph.sizes.lengths import ENGINE, MAX_SEQUENCES, Lengths, setting
from flowrl.graph.sizes.measure import Sizes, lengths_of, measure
from flowrl.graph.sizes.memory import width_of_engine
from flowrl.simulate.costs import Costs, Decoding, Drawn

ROW_SECONDS = 1e-4
"""Of a row in a node without a model."""
MODEL_ROW_SECONDS = 1e-2
"""Of a row in a node whose model is not known."""
CALL_SECONDS = 4e-3
"""An actor call that fetches a few columns and puts one back, on one machine."""
KEPT = 0.7
"""Share of the groups that a gate keeps."""
MEAN_SHARE = 0.5
"""Mean length of a response, as a share of the longest one allowed."""
SYNC_SECONDS = 0.05
"""Of a weight sync, beside its bytes."""
MAX_SESSIONS = 512
"""Sessions that an engine generates at a time, where the node does not say."""


@dataclass(frozen=True)
class Device:
    """What one worker reaches in practice, not on paper."""

    flops: float
    """Operations per second."""
    bandwidth: float
    """Bytes of memory per second."""
    link: float
    """Bytes of weights per second, from one worker to another."""
    step_seconds: float
    """Of a decoding step, whatever it computes."""


DEVICES: Mapping[str, Device] = {
    "cpu": Device(5e10, 1e10, 1e9, 2e-3),
    "a100": Device(0.4 * 312e12, 0.7 * 2.04e12, 2e10, 2e-3),
    "h100": Device(0.4 * 989e12, 0.7 * 3.35e12, 4e10, 2e-3),
}
"""A few cores; and accelerators at 40 % of their operations in bfloat16 and 70 % of their bandwidth, as published."""


def estimate(plan: Plan, name: str, prompt_tokens: int | None = None, response_tokens: int | None = None) -> Costs:
    """The costs of a plan on workers with a device of this name, for prompts and longest responses of these lengths."""
    device, sizes = DEVICES[name], measure(plan, lengths_of(plan, prompt_tokens, response_tokens))
    return Costs(
        source=f"estimated for workers of {_spoken(device)} ({name}); nothing was measured",
        group_seconds=dict(_group_seconds(plan, sizes, device)),
        decoding={
            node.name: _decoding(plan, node, sizes, device)
            for node in plan.graph.nodes.values()
            if node.weights == "generates"
        },
        sync_seconds={
            sync.node: SYNC_SECONDS + (sync.num_bytes / device.link if isinstance(sync.num_bytes, int) else 0.0)
            for sync in sizes.syncs
        },
        call_seconds=CALL_SECONDS,
        kept=KEPT if plan.gate is not None else 1.0,
        notes=tuple(_notes(plan, sizes)),
    )


def _spoken(device: Device) -> str:
    return f"{human_flops(device.flops)}/s and {device.bandwidth / 1e9:,.0f} GB/s"


def _notes(plan: Plan, sizes: Sizes) -> Iterator[str]:
    unknown = [each.node for each in sizes.work if not isinstance(each.flops, int)]
    if unknown:
        yield f"{', '.join(unknown)}: the model is not known, {1e3 * MODEL_ROW_SECONDS:g} ms a row are assumed"
    if plan.gate is not None:
        yield f"{plan.gate.name}: {100 * KEPT:g} % of the groups kept are assumed"


def _group_seconds(plan: Plan, sizes: Sizes, device: Device) -> Iterator[tuple[str, float]]:
    flops, batch = {each.node: each.flops for each in sizes.work}, plan.document.batch
    for node in plan.graph.nodes.values():
        known = flops.get(node.name)
        if node.weights in ("generates", "syncs"):
            continue
        if isinstance(known, int) and known:
            yield node.name, known / batch.prompts / device.flops
        else:
            yield node.name, plan.sessions[node.name] * (ROW_SECONDS if node.weights is None else MODEL_ROW_SECONDS)


def _decoding(plan: Plan, node: BoundNode, sizes: Sizes, device: Device) -> Decoding:
    """A step reads the weights once, and for each sequence its cache; on so many devices as one copy is split over."""
    lengths, group = sizes.lengths.of(node.name), node.sessions
    step = sequence = prefix = 0.0
    model = sizes.models.get(node.model or "")
    if isinstance(model, Architecture) and getattr(node.node, ENGINE, None) != "fake":
        assert node.model is not None, "it has sizes"
        width = width_of_engine(node, plan.document.models[node.model])
        step, sequence, prefix = _seconds_of(model, width, lengths, device)
    num_devices = node.workers_per_copy
    return Decoding(
        lengths=Drawn(max(1.0, MEAN_SHARE * lengths.response_tokens), lengths.response_tokens, group),
        step_seconds=device.step_seconds + step / num_devices,
        sequence_seconds=sequence / num_devices,
        prefix_seconds=prefix / num_devices,
        prompt_tokens=lengths.prompt_tokens,
        max_groups=max(1, (setting(node, MAX_SEQUENCES) or MAX_SESSIONS) // group),
        one_call_a_step=getattr(node.node, ENGINE, None) == "transformers",
    )


def _seconds_of(model: Architecture, width: int, lengths: Lengths, device: Device) -> tuple[float, float, float]:
    """Of a decoding step; of a sequence in it; of a token that is read in a prompt or once more."""
    context = lengths.prompt_tokens + MEAN_SHARE * lengths.response_tokens / 2
    cache = model.kv_values_per_token * width * context / device.bandwidth
    token = forward_flops(model, 1, context, 1) / device.flops
    return model.num_active_parameters * width / device.bandwidth, cache + token, token

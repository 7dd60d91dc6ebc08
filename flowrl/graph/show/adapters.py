"""What trains of a model that has adapters (LoRA), as lines of text."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.graph.plan import Plan
from flowrl.graph.show.text import listed, wrapped
from flowrl.graph.sizes.adapters import num_trained
from flowrl.graph.sizes.architecture import Unknown
from flowrl.graph.sizes.measure import Sizes


def adapter_lines(plan: Plan, sizes: Sizes) -> Iterator[str]:
    """A line for each model of which only adapters train."""
    for name, spec in plan.document.models.items():
        if spec.lora is None:
            continue
        model, targets = sizes.models[name], spec.lora.target_modules
        where = targets if isinstance(targets, str) else listed(targets)
        said, rslora = "adapters of unknown size", ", rslora" * spec.lora.rslora
        if not isinstance(model, Unknown):
            num = num_trained(model, spec)
            said = f"{num:,} parameters beside {model.num_parameters:,} frozen ones ({num / model.num_parameters:.2%})"
        line = f"lora        {name} trains {said}: rank {spec.lora.rank}, alpha {spec.lora.alpha}{rslora}, {where}"
        yield from wrapped(line, 0, 12)

"""Weights & Biases, online or offline: metrics, samples and the settings of a run."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any
from uuid import uuid4

from flowrl.encode import plain
from flowrl.schedule.record import Samples, Status
from flowrl.spec.tracking import WandbTracking
from flowrl.track.names import escaped
from flowrl.track.tracker import CLOSE_SECONDS, SEND_SECONDS, Complain, Point, Service

INIT_SECONDS = 10.0
"""Longest wait for a server; the tracker tries again later."""
EXIT_CODES: dict[Status, int] = {"finished": 0, "failed": 1, "interrupted": 130}
ENVIRONMENT = {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
"""Set for this process unless the user has set them."""
# wandb keeps names with a leading underscore for itself, and `step` is ours; the colon is our escape.
REFUSED = re.compile("[:\ud800-\udfff]|^_|^s(?=tep\\Z)")


class Wandb(Service):
    """One run of a project. Steps are a value of their own, `step`, since a resumed run goes back in them."""

    def __init__(self, spec: WandbTracking, folder: Path, *, project: str, params: Mapping[str, Any]) -> None:
        """`params` is the resolved document; `folder` is the run folder."""
        self._spec, self._folder, self._params = spec, folder, params
        self._project = re.sub(r"[/\\#?%:]", "-", spec.project or project)
        self.shown = f"wandb project {self._project}" + f" of {spec.entity}" * bool(spec.entity)
        self.local = spec.mode == "offline"
        self._run: Any = None

    def connect(self, run_id: str, complain: Complain) -> str:
        """Start a run that is not the process's global one."""
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import wandb

        if not self.local and not wandb.login(prompt=False, verify=False):
            raise PermissionError("no API key: `wandb login`, WANDB_API_KEY, or mode: offline")
        settings = wandb.Settings(
            console="off", silent=True, disable_code=True, disable_git=True, save_code=False,
            init_timeout=INIT_SECONDS, finish_timeout=CLOSE_SECONDS["finished"],
            # Else it waits for minutes, also when the interpreter exits.
            x_graphql_retry_max=2, x_graphql_timeout_seconds=5, x_graphql_retry_wait_max_seconds=2,
            x_transaction_log_flush_interval=SEND_SECONDS,  # what a killed run may lack
        )  # fmt: skip
        self._run = wandb.init(
            project=self._project, entity=self._spec.entity, name=self._folder.name, dir=str(self._folder),
            id=run_id or uuid4().hex[:12], resume="allow", mode=self._spec.mode, config=plain(self._params),
            reinit="create_new", settings=settings,
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def send(self, points: Sequence[Point]) -> None:
        """One entry of its history for each step."""
        for step, group in groupby(points, key=lambda point: point.step):
            self._run.log({escaped(point.name, REFUSED): point.value for point in group} | {"step": step})

    def show(self, samples: Samples) -> None:
        """A table of wandb's."""
        import wandb

        table = wandb.Table(columns=list(samples.columns), data=samples.rows, allow_mixed_types=True)
        self._run.log({"samples": table, "step": samples.step})

    def end(self, status: Status) -> None:
        """Say how it ended, and let it send what is left."""
        self._run.finish(exit_code=EXIT_CODES[status])

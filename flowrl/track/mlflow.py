"""MLflow: parameters, metrics, samples and the graph of a run."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flowrl.encode import dumps
from flowrl.schedule.record import Samples, Status
from flowrl.track.names import escaped
from flowrl.track.record import RunFolder
from flowrl.track.tracker import Complain, Point, Service, brief

MAX_PARAMS, MAX_VALUE, MAX_NAME = 100, 6000, 250
"""MLflow's own limits: params a request, characters of a param's value and of a name."""
MAX_LISTED = 100
"""Tables of samples that MLflow's page lists, the newest: it keeps their names in a tag of 8,000 characters."""
STATUS: dict[Status, str] = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
ENVIRONMENT = {
    # MLflow's defaults wait for minutes; trying again later is the tracker's job.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Set for this process unless the user has set them."""
ATTEMPT = "flowrl.attempt"
"""Tag: how often the run was started, the first time included."""

# Everything outside MLflow's alphabet, and what it refuses because a name must not resolve to another path:
# a slash at an end or after a slash, and a dot that begins a part. The colon is allowed, but is our escape.
REFUSED = re.compile(r"[^A-Za-z0-9_./ -]|^/|/\Z|(?<=/)/|(?<![^/])\.")


def flat(params: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted name and text of every leaf of a document; a text too long for MLflow ends in `...`."""
    for name, value in params.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            text = value if isinstance(value, str) else dumps(value)
            yield f"{prefix}{name}", text if len(text) <= MAX_VALUE else text[: MAX_VALUE - 3] + "..."


class Mlflow(Service):
    """One run of an MLflow experiment; without `uri`, `MLFLOW_TRACKING_URI` or `mlflow.db` beside the run folder."""

    def __init__(
        self,
        folder: RunFolder,
        *,
        experiment: str,
        uri: str | None,
        params: Mapping[str, Any],
        artifacts: Mapping[str, str],
    ) -> None:
        """`params` is the resolved document; `artifacts` maps file names to their text."""
        self._folder, self._experiment, self._params, self._artifacts = folder, experiment, params, artifacts
        self._uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.root / 'mlflow.db'}"
        self.shown = re.sub(r"//[^/@\s]*@", "//", f"MLflow at {self._uri}")
        self.local = self._uri.startswith("sqlite:")
        self._run_id = ""
        self._tables: list[str] = []

    @property
    def key(self) -> str:
        """A server has many experiments."""
        return f"{self.shown}, experiment {self._experiment}"

    def connect(self, run_id: str, complain: Complain) -> str:
        """Make a client and a run; one that goes on is marked with the number of the attempt."""
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        for name in ("mlflow", "alembic"):  # after the import, which sets their levels
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._complain, self._client = complain, MlflowClient(tracking_uri=self._uri)
        if not (run_id and self._goes_on(run_id)):
            tags = {"mlflow.source.name": "flowrl", "flowrl.folder": str(self._folder.path), ATTEMPT: "1"}
            run = self._client.create_run(self._experiment_id(), tags=tags, run_name=self._folder.path.name)
            self._run_id = str(run.info.run_id)
            self._describe(self._params)
        return self._run_id

    def _goes_on(self, run_id: str) -> bool:
        """Whether that run is still there; it then runs again."""
        from mlflow.exceptions import MlflowException

        try:
            run = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            run = None
        if run is None or run.info.lifecycle_stage == "deleted":
            self._complain("resume", f"has no run {run_id} any more; the resumed run is a new one there")
            return False
        self._run_id = run_id
        self._client.update_run(run_id, status="RUNNING")
        self._client.set_tag(run_id, ATTEMPT, str(int(run.data.tags.get(ATTEMPT, "1")) + 1))
        self._describe({})  # a param cannot be changed
        return True

    def _experiment_id(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        if found is not None:
            return str(found.experiment_id)
        # A server knows where artifacts belong; a database file would put them below the current folder.
        location = (self._folder.root / "mlartifacts").as_uri() if self.local else None
        return str(self._client.create_experiment(self._experiment, artifact_location=location))

    def _describe(self, params: Mapping[str, Any]) -> None:
        """Parameters and artifacts: tried once, since the metrics must not wait for them."""
        from mlflow.entities import Param

        try:
            named = [Param(self._named(name), text) for name, text in flat(params) if self._fits(name)]
            for start in range(0, len(named), MAX_PARAMS):
                self._client.log_batch(self._run_id, params=named[start : start + MAX_PARAMS])
            for file, text in self._artifacts.items():
                self._client.log_text(self._run_id, text, file)
        except Exception as error:  # whatever it is, training goes on
            self._complain("describe", f"did not take the parameters or the graph: {brief(error)}")

    def send(self, points: Sequence[Point]) -> None:
        """One request."""
        from mlflow.entities import Metric

        metrics = [Metric(self._named(p.name), p.value, p.milliseconds, p.step) for p in points if self._fits(p.name)]
        self._client.log_batch(self._run_id, metrics=metrics)

    def show(self, samples: Samples) -> None:
        """A table of MLflow's: JSON, and a tag that says so; its own `log_table` outgrows that tag."""
        file = f"samples/step_{samples.step:06d}.json"
        self._client.log_text(self._run_id, dumps({"columns": list(samples.columns), "data": samples.rows}), file)
        self._tables = [*self._tables, file][-MAX_LISTED:]
        listed = dumps([{"path": path, "type": "table"} for path in self._tables])
        self._client.set_tag(self._run_id, "mlflow.loggedArtifacts", listed)

    def end(self, status: Status) -> None:
        """Say how it ended."""
        self._client.set_terminated(self._run_id, STATUS[status])

    def _named(self, name: str) -> str:
        return escaped(name, REFUSED)

    def _fits(self, name: str) -> bool:
        fits = len(self._named(name)) <= MAX_NAME
        if not fits:
            self._complain(name, f"does not get '{name[:40]}...': it allows {MAX_NAME} characters for a name")
        return fits

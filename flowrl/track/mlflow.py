"""MLflow: parameters, metrics and the graph of a run, sent by one background thread.

Importing MLflow takes 1 to 3 s, starting a fresh SQLite store 2.4 s and logging 45 metrics 12 ms; none of it is waited
for. The thread is our own and a daemon, because MLflow's asynchronous queue is joined when the interpreter exits, and
so hangs the end of a run whose server is away. What cannot be sent is kept and tried again; the first trouble is noted.
"""

from __future__ import annotations

import logging
import math
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from flowrl.encode import dumps
from flowrl.run_files import keep_tracker_id, read_info, tracker_id
from flowrl.schedule.record import Event, Level, Status
from flowrl.track.record import Note, RunFolder

if TYPE_CHECKING:
    from mlflow import MlflowClient

SEND_SECONDS = 1.0
"""Metrics of this long travel together: a commit of SQLite costs about the same for one step as for ten."""
RETRY_SECONDS = 10.0
LOCAL_SECONDS = 60.0
"""A file cannot be away: a fresh one only takes its time to be made, on a busy machine more than `CLOSE_SECONDS`."""
CLOSE_SECONDS: dict[Status, float] = {"finished": 10.0, "failed": 10.0, "interrupted": 3.0}
"""Longest wait at the end of a run; less after Ctrl-C, when somebody waits for the prompt."""
MAX_WAITING = 200_000
"""Values kept while the server is away, about 4,000 steps; later ones are not sent."""
MAX_BATCH, MAX_PARAMS, MAX_VALUE, MAX_NAME = 1000, 100, 6000, 250
"""MLflow's own limits: metrics and params a request, characters of a param's value and of a name."""
STATUS: dict[Status, str] = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
ENVIRONMENT = {
    # MLflow's defaults wait for minutes; trying again later is this module's job.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Set for this process unless the user has set them."""

# Everything outside MLflow's alphabet, and what it refuses because a name must not resolve to another path:
# a slash at an end or after a slash, and a dot that begins a part. The colon is allowed, but is our escape.
_ESCAPED = re.compile(r"[^A-Za-z0-9_./ -]|^/|/\Z|(?<=/)/|(?<![^/])\.")
_NAMED = {"@": "at"}
_CHARACTERS = {"at": "@", "": ""}


def to_mlflow(name: str) -> str:
    """A name that MLflow accepts, different for every name: `val/acc@4` is `val/acc:at:4`, `time(s)` `time:28:s:29:`.

    A character is escaped as its code point in hexadecimal between colons.
    """
    return _ESCAPED.sub(lambda match: f":{_NAMED.get(match[0]) or format(ord(match[0]), 'x')}:", name) or "::"


def from_mlflow(name: str) -> str:
    """The name that `to_mlflow` was given."""

    def character(match: re.Match[str]) -> str:
        return _CHARACTERS[match[1]] if match[1] in _CHARACTERS else chr(int(match[1], 16))

    return re.sub(r":([0-9a-z]*):", character, name)


def flat(params: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted name and text of every leaf of a document; a text too long for MLflow ends in `...`."""
    for name, value in params.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            text = value if isinstance(value, str) else dumps(value)
            yield f"{prefix}{name}", text if len(text) <= MAX_VALUE else text[: MAX_VALUE - 3] + "..."


class MlflowRecorder:
    """One run of an MLflow experiment; without `uri`, `MLFLOW_TRACKING_URI` or `mlflow.db` beside the run folder."""

    def __init__(
        self,
        folder: RunFolder,
        *,
        experiment: str,
        uri: str | None,
        params: Mapping[str, Any],
        artifacts: Mapping[str, str],
        note: Note,
    ) -> None:
        """`params` is the resolved document; `artifacts` maps file names to their text."""
        self._folder, self._experiment, self._params, self._artifacts = folder, experiment, params, artifacts
        self._uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.root / 'mlflow.db'}"
        self._note = note
        self._client: MlflowClient | None = None
        self._run_id = ""
        self._status: Status = "finished"
        self._waiting: list[tuple[str, float, int, int]] = []
        self._trouble: list[str] = []
        self._complaints: set[str] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="flowrl-mlflow", daemon=True)
        self._thread.start()

    def event(self, event: Event) -> None:
        """Blocks of nodes are not for MLflow."""

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        """Hand the metrics to the thread; NaN and infinity leave a gap, as MLflow cannot draw them."""
        now = int(time.time() * 1000)
        if len(self._waiting) < MAX_WAITING:
            for name, value in metrics.items():
                if math.isfinite(value) and self._fits(name):
                    self._waiting.append((to_mlflow(name), float(value), now, step))
        self._tell()

    def note(self, text: str, level: Level = "info") -> None:
        """Notes are not for MLflow."""

    def stage(self, text: str) -> None:
        """Not for the tracker."""

    def close(self, status: Status, errors: Sequence[str] = ()) -> None:
        """Send what is left and end the run in MLflow, within `CLOSE_SECONDS`."""
        self._status = status
        self._closing.set()
        local = status == "finished" and self._uri.startswith("sqlite:")
        self._thread.join(LOCAL_SECONDS if local else CLOSE_SECONDS[status])
        if self._thread.is_alive():
            self._complain("close", "did not answer in time; its last values may be missing")
        self._tell()

    def _tell(self) -> None:
        """Pass the thread's trouble on; only ever in the caller's thread, so that no other recorder needs a lock."""
        while self._trouble:
            self._note(self._trouble.pop(0), "warning")

    def _complain(self, topic: str, text: str) -> None:
        """Something to pass on, once a topic; without the password that a URI may hold."""
        if topic not in self._complaints:
            self._complaints.add(topic)
            self._trouble.append(re.sub(r"//[^/@\s]*@", "//", f"MLflow at {self._uri} {text}"))

    def _fits(self, name: str) -> bool:
        fits = len(to_mlflow(name)) <= MAX_NAME
        if not fits:
            self._complain(name, f"does not get '{name[:40]}...': it allows {MAX_NAME} characters for a name")
        return fits

    def _work(self) -> None:
        while True:
            last = self._closing.is_set()  # read first: whatever was handed over before close() is still sent
            seconds = SEND_SECONDS
            try:
                self._send(last)
            except Exception as error:  # whatever it is, training goes on
                seconds = RETRY_SECONDS
                self._complain("send", f"failed; training goes on, and it is tried again: {_brief(error)}")
            if last:
                return
            self._closing.wait(seconds)

    def _send(self, last: bool) -> None:
        client = self._client or self._connect()
        from mlflow.entities import Metric

        while batch := self._waiting[:MAX_BATCH]:
            client.log_batch(self._run_id, metrics=[Metric(*value) for value in batch])
            del self._waiting[: len(batch)]
        if last:
            client.set_terminated(self._run_id, STATUS[self._status])

    def _connect(self) -> MlflowClient:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        for name in ("mlflow", "alembic"):  # after the import, which sets their levels
            logging.getLogger(name).setLevel(logging.CRITICAL)
        client = MlflowClient(tracking_uri=self._uri)
        if not self._goes_on(client):
            tags = {"mlflow.source.name": "flowrl", "flowrl.folder": str(self._folder.path)}
            experiment = self._experiment_id(client)
            self._run_id = client.create_run(experiment, tags=tags, run_name=self._folder.path.name).info.run_id
            with suppress(OSError):  # a full disk is told by those whose job it is
                keep_tracker_id(self._folder.path, "mlflow", self._run_id)
            self._describe(client)
        self._client = client
        return client

    def _goes_on(self, client: MlflowClient) -> bool:
        """Whether an earlier attempt at the run has made a run here, which this one then continues and marks."""
        known, info = tracker_id(self._folder.path, "mlflow"), read_info(self._folder.path)
        if not known or info is None:
            return False
        try:
            client.update_run(known, status="RUNNING")
        except Exception:  # it is of another server, or somebody has deleted it
            return False
        self._run_id, attempt = known, len(info.attempts)
        client.set_tag(known, "flowrl.attempts", str(attempt))
        client.set_tag(known, f"flowrl.attempt_{attempt}", f"after step {info.attempts[-1].after_step}")
        return True

    def _experiment_id(self, client: MlflowClient) -> str:
        found = client.get_experiment_by_name(self._experiment)
        if found is not None:
            return str(found.experiment_id)
        # A server knows where artifacts belong; a database file would put them below the current folder.
        local = self._uri.startswith("sqlite:")
        location = (self._folder.root / "mlartifacts").as_uri() if local else None
        return str(client.create_experiment(self._experiment, artifact_location=location))

    def _describe(self, client: MlflowClient) -> None:
        """Parameters and artifacts: tried once, since the metrics must not wait for them."""
        from mlflow.entities import Param

        try:
            params = [Param(to_mlflow(name), text) for name, text in flat(self._params) if self._fits(name)]
            for start in range(0, len(params), MAX_PARAMS):
                client.log_batch(self._run_id, params=params[start : start + MAX_PARAMS])
            for file, text in self._artifacts.items():
                client.log_text(self._run_id, text, file)
        except Exception as error:  # whatever it is, training goes on
            self._complain("describe", f"did not take the parameters or the graph: {_brief(error)}")


def _brief(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"

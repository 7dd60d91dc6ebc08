"""What every vLLM process loads before it starts (entry-point group `vllm.general_plugins`).

It does nothing, and imports nothing, outside the processes of a flowrl engine.
"""

from __future__ import annotations

import os

BACKEND = "flowrl"
"""Name of our weight transfer, for vLLM's `weight_transfer_config`."""
MARK = "FLOWRL_CHILD"
"""Is in the environment of the processes of a flowrl engine."""


def register() -> None:
    """Make our weight transfer known to vLLM, and let this process end with the one that started it."""
    if MARK not in os.environ:
        return
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "flowrl.nodes._backend.shm_transfer", "Transfer")
    _end_with_parent()


def _end_with_parent() -> None:
    """A worker that is killed must leave no process behind: nothing but its end tells its children of it."""
    import multiprocessing
    import threading

    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_watch, args=(parent.sentinel,), name="parent", daemon=True).start()


def _watch(sentinel: int) -> None:
    from multiprocessing.connection import wait

    wait([sentinel])
    os._exit(1)

"""A pool of ranks for tests: processes that stay, joined by gloo, and what one of them does with a batch."""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

SECONDS = 180
"""Ranks that take longer wait for each other."""


class Ranks:
    """So many processes in one process group; a function runs on all of them at once."""

    def __init__(self, num_ranks: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        spawn = multiprocessing.get_context("spawn")
        pipes = [spawn.Pipe() for _ in range(num_ranks)]
        self.connections = [here for here, _ in pipes]
        self.processes = [
            spawn.Process(target=serve, args=(there, rank, num_ranks, port), daemon=True)
            for rank, (_, there) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()

    def run(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`work(rank, num_ranks, *arguments)` of every rank."""
        for connection in self.connections:
            connection.send((work, arguments))
        found = []
        for rank, connection in enumerate(self.connections):
            if not connection.poll(SECONDS):
                self.close()
                raise TimeoutError(f"rank {rank} of {len(self.connections)} waits for the others")
            result, error = connection.recv()
            if error:
                self.close()
                raise RuntimeError(f"rank {rank}: {error}")
            found.append(result)
        return found

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()


def serve(connection: Any, rank: int, num_ranks: int, port: int) -> None:
    """A rank: as a worker of a pool would find itself."""
    import torch

    torch.set_num_threads(1)
    names = {"RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in names.items()} if num_ranks > 1 else {}
    while True:
        work, arguments = connection.recv()
        try:
            connection.send((work(rank, num_ranks, *arguments), ""))
        except Exception:
            connection.send((None, traceback.format_exc()))

"""Runs of the real command, each in an empty folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from runs import Finished, finish


@pytest.fixture
def flowrl(tmp_path: Path) -> Callable[..., Finished]:
    """Run `flowrl ARGUMENTS` in an empty folder."""
    return partial(finish, tmp_path)

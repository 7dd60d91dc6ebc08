"""What all tests share."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# Who starts tests in the background may ignore Ctrl-C, and so would every run that they start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("flowrl", deadline=None, derandomize=True)
settings.load_profile("flowrl")

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    """`pytest --update-golden` writes the expected texts anew; look at the difference before committing it."""
    parser.addoption("--update-golden", action="store_true", help="write the expected texts under tests/golden anew")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a text with the file of that name under tests/golden."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), f"{name} has changed; `pytest --update-golden` accepts it"

    return compare

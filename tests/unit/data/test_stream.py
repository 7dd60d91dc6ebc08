"""Order and identity of prompts."""

from __future__ import annotations

import pytest

from flowrl.data.rows import Streamed
from flowrl.data.stream import Prompt, PromptStream, epoch_order, prompt_name
from flowrl.errors import RunError

ROWS = [{"prompt": str(number)} for number in range(10)]


def test_a_uid_tells_row_epoch_and_attempt() -> None:
    assert prompt_name(0, 17) == "u17"
    assert prompt_name(1, 17) == "u17e1"
    assert prompt_name(1, 17, 2) == "u17s2e1"
    assert Prompt(prompt_name(0, 17), {}).uid == "u17"
    assert Prompt(prompt_name(1, 17), {}, attempt=2).uid == "u17e1a2"


def test_rows_come_in_file_order_when_not_shuffled_and_epochs_follow_each_other() -> None:
    stream = PromptStream(ROWS, seed=0, shuffle=False)
    assert [prompt.uid for prompt in stream.take(8)] == [f"u{row}" for row in range(8)]
    assert [prompt.uid for prompt in stream.take(4)] == ["u8", "u9", "u0e1", "u1e1"]


def test_the_order_follows_from_seed_and_epoch_alone() -> None:
    assert epoch_order(6, 0, 0) == epoch_order(6, 0, 0)
    orders = [epoch_order(50, seed, epoch) for seed in (-1, 0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 6
    assert all(sorted(order) == list(range(50)) for order in orders)


def test_the_order_never_changes_between_versions() -> None:
    assert epoch_order(10, 0, 0) == [0, 8, 9, 3, 7, 5, 1, 2, 6, 4]


def test_a_prompt_carries_its_row() -> None:
    for prompt in PromptStream(ROWS, seed=3).take(10):
        assert prompt.uid == f"u{prompt.row['prompt']}"


@pytest.mark.parametrize("size", [1, 3, 7, 10])
def test_a_batch_never_holds_a_row_twice_and_every_row_comes_once_an_epoch(size: int) -> None:
    stream = PromptStream(ROWS, seed=1)
    taken: list[str] = []
    for _ in range(60):
        batch = stream.take(size)
        assert len({prompt.row["prompt"] for prompt in batch}) == size
        taken += [prompt.uid for prompt in batch]
    assert len(set(taken)) == len(taken)
    settled = len(taken) // len(ROWS) - 1
    assert {prompt_name(epoch, row) for epoch in range(settled) for row in range(len(ROWS))} <= set(taken)


@pytest.mark.parametrize("shuffle", [True, False])
def test_stopping_anywhere_changes_nothing(shuffle: bool) -> None:
    whole = PromptStream(ROWS, seed=2, shuffle=shuffle)
    expected = [whole.take(4) for _ in range(12)]
    state, got = PromptStream(ROWS, seed=2, shuffle=shuffle).state(), []
    for _ in range(12):
        resumed = PromptStream(ROWS, seed=2, shuffle=shuffle)
        resumed.load_state(state)
        got.append(resumed.take(4))
        state = resumed.state()
    assert got == expected


def streamed(num: int, window: int) -> Streamed:
    return Streamed(({"prompt": str(number)} for number in range(num)), window)


@pytest.mark.parametrize("num", [1, 5, 16, 17, 32, 40])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_stream_gives_every_row_once_an_epoch_and_starts_again_when_it_ends(num: int, shuffle: bool) -> None:
    stream = PromptStream(streamed(num, 16), seed=1, shuffle=shuffle)
    for epoch in range(3):
        taken = [stream.take(1)[0] for _ in range(num)]
        assert sorted(prompt.uid for prompt in taken) == sorted(prompt_name(epoch, row) for row in range(num))
        assert all(prompt.uid.split("e")[0] == f"u{prompt.row['prompt']}" for prompt in taken)
        if not shuffle:
            assert [prompt.row["prompt"] for prompt in taken] == [str(row) for row in range(num)]


def test_a_stream_is_read_a_window_at_a_time_and_shuffled_inside_it() -> None:
    source = streamed(10**9, 16)
    stream = PromptStream(source, seed=0)
    first = [int(prompt.row["prompt"]) for prompt in stream.take(16)]
    assert sorted(first) == list(range(16)) != first
    assert source.num_read == 16
    second = [int(prompt.row["prompt"]) - 16 for prompt in stream.take(16)]
    assert sorted(second) == list(range(16))
    assert second not in (first, list(range(16)))
    assert source.num_read == 32


def test_a_stream_goes_on_from_a_state_in_the_same_order() -> None:
    whole = PromptStream(streamed(21, 8), seed=4)
    expected = [whole.take(5) for _ in range(12)]
    state, got = PromptStream(streamed(21, 8), seed=4).state(), []
    for _ in range(12):
        resumed = PromptStream(streamed(21, 8), seed=4)
        resumed.load_state(state)
        got.append(resumed.take(5))
        state = resumed.state()
    assert got == expected


def test_too_few_rows_for_a_batch_are_told() -> None:
    assert PromptStream(ROWS, 0).shortage(10) == ""
    assert PromptStream(ROWS, 0).shortage(11) == "11 prompts are needed at once, but there are 10"
    assert PromptStream(streamed(7, 4), 0).shortage(8) == "8 prompts are needed at once, but there are 7"
    with pytest.raises(RunError, match="there are 10"):
        PromptStream(ROWS, 0).take(11)

"""Numbers in words, for messages and pages."""

from __future__ import annotations


def count(num: int, one: str, many: str = "") -> str:
    """`1 row`, `2 rows`; `many` where an s is not enough."""
    return f"{num:,} {one if num == 1 else many or f'{one}s'}"


def between(numbers: tuple[int, int], one: str) -> str:
    """`1 row`, `85 rows` or `85 or 86 rows`, of the fewest and the most."""
    low, high = numbers
    return count(high, one) if low == high else f"{low:,} or {count(high, one)}"


def ordinal(num: int) -> str:
    """`2nd`, `3rd`, `11th`."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(num % 10, "th") if num // 10 % 10 != 1 else "th"
    return f"{num:,}{ending}"

"""What a run would take: the real loop and schedules, on a clock that jumps and workers that only take time."""

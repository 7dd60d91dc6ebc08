"""How large a step is: lengths, models, memory, FLOPs and bytes, computed before anything starts."""

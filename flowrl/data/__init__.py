"""Data sets: rows of prompts with declared columns, and the order in which a run takes them."""

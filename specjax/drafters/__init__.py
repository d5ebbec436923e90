"""Drafting methods, each one file that exports make(...) -> `Drafter`."""

"""The race to fine-tune one checkpoint: a section of its own, run and kept as `race.py` does it."""

from race import fine_tuning as report

__all__ = ["report"]

"""How numbers, times, bytes and names are written for people, everywhere alike."""

import math
from collections.abc import Sequence

MIB, GIB = 2**20, 2**30
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
ABSENT = "—"  # a number that cannot be given


def percent(share: float | None) -> str:
    """`98.3 %`, and `100 %` only where nothing is missing; a dash for what is no number."""
    if share is None or not math.isfinite(share):
        return ABSENT
    text = f"{100 * share:.1f}"
    return f"{100 if share == 1 else min(text, '99.9', key=float)} %"


def listed(names: Sequence[str], most: int = 5, *, quoted: bool = False) -> str:
    """`a, b, c`, or the first of them and how many more."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(repr if quoted else str, names[:most])) + more


def cut(text: str, width: int) -> str:
    """The text, or as much of it as there is room for, and `…`."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def duration(seconds: float) -> str:
    """`2 min 5 s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def size(count: float) -> str:
    """`785 KiB`, `2.1 MiB`, `1.25 GiB`: so many bytes."""
    unit = 0
    while count >= 1024 and unit < len(UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:,.{min(max(unit - 1, 0), 2)}f} {UNITS[unit]}"


def number(value: float) -> str:
    """Three digits that matter, and all of a large one: `0.0312`, `45.6`, `1,234`."""
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"

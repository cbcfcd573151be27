"""Format numbers, durations, sizes, lists and commands for messages and reports."""

import math
import shlex
from collections.abc import Sequence

MIB, GIB = 2**20, 2**30
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
ABSENT = "—"  # for a value that is not available


def percent(share: float | None) -> str:
    """`98.3 %`; `100 %` only for exactly 1, a dash for None, NaN and infinity."""
    if share is None or not math.isfinite(share):
        return ABSENT
    text = f"{100 * share:.1f}"
    return f"{100 if share == 1 else min(text, '99.9', key=float)} %"


def comma_list(names: Sequence[str], limit: int = 5, *, quoted: bool = False) -> str:
    """`a, b, c`, shortened to `limit` names: `a, b, c and 7 more`."""
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return ", ".join(map(repr if quoted else str, names[:limit])) + more


def truncate(text: str, width: int) -> str:
    """Shorten a text to `width` characters, ending in `…`."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def shell_command(*words: object) -> str:
    """`vitrail evaluate 'runs/my photos'`: a command to copy, quoted where a shell needs it."""
    return shlex.join(["vitrail", *map(str, words)])


def duration(seconds: float) -> str:
    """`2 min 5 s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def byte_size(count: float) -> str:
    """`785 KiB`, `2.1 MiB`, `1.25 GiB`."""
    unit = 0
    while count >= 1024 and unit < len(UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:,.{min(max(unit - 1, 0), 2)}f} {UNITS[unit]}"


def number(value: float) -> str:
    """Three significant digits, or all digits of a large number: `0.0312`, `45.6`, `1,234`."""
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"

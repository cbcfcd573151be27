"""What to do about a data set: sentences, the most urgent first."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitrail.data.health import Health

FEW = 10  # pictures, below which a class can hardly be learned
UNEVEN = 10  # times more pictures in the largest class than in the smallest
NAMED = 3  # classes in a sentence; the rest are counted
READY = "Nothing is wrong with it, as far as can be seen without training."


def verdict(health: "Health") -> Iterator[str]:
    """Each problem and its remedy; `READY` if there is none."""
    found = [*pictures(health), *labels(health)]
    yield from found or [READY]
    if health.examined < health.pictures:
        yield (
            f"Only {health.examined:,} of {health.pictures:,} pictures were looked at; "
            "run it without a limit to find what is wrong with the rest."
        )


def pictures(health: "Health") -> Iterator[str]:
    """What is wrong with files and with their place in splits."""
    if health.leaks:
        exact = sum(twins.exact for twins in health.leaks)
        yield (
            f"{there(len(health.leaks), 'picture')} found in more than one split ({exact:,} "
            f"exactly, {len(health.leaks) - exact:,} nearly): keep each in one split only, or "
            "results will look better than they are."
        )
    if health.unreadable:
        yield (
            f"{there(len(health.unreadable), 'file')} not readable: mend or delete them; in "
            "training another sample would take the place of each."
        )
    if health.conflicts:
        yield (
            f"{there(len(health.conflicts), 'picture')} found under more than one label: decide "
            "which is right, and delete the other copies."
        )
    inside = [twins for twins in health.duplicates if not (twins.leak or twins.conflict)]
    near = [twins for twins in health.near_duplicates if not (twins.leak or twins.conflict)]
    if inside or near:
        yield (
            f"{there(len(inside) + len(near), 'picture')} found more than once in a split "
            f"({len(inside):,} exactly, {len(near):,} nearly): one copy of each is enough."
        )
    if health.blank:
        yield f"{there(len(health.blank), 'picture')} of a single color: look whether it is meant."
    if health.small:
        yield (
            f"{there(len(health.small), 'picture')} much smaller than the rest: look whether "
            "it is a preview of something larger."
        )
    if health.gray:
        yield (
            f"{there(len(health.gray), 'picture')} gray among pictures in color: no harm, unless "
            "gray goes with some classes only."
        )


def labels(health: "Health") -> Iterator[str]:
    """What is odd about the classes."""
    totals = {name: sum(counts.values()) for name, counts in health.counts.items()}
    for alike in same_but_for_spelling(health.classes):
        yield f"Classes {listed(alike)} differ only in case or spaces: make them one."
    empty = [name for name, count in totals.items() if not count]
    if empty:
        yield f"No picture at all of {classes(empty)}: delete the class, or add pictures."
    for split in health.splits if len(health.splits) > 1 else ():
        missing = [n for n, counts in health.counts.items() if totals[n] and not counts[split]]
        if missing:
            remedy = (
                "it cannot be learned; add pictures or delete the class"
                if split == "train"
                else "no result there speaks for it; move some pictures over"
            )
            yield f"No picture of {classes(missing)} in {split}: {remedy}."
    few = [name for name, count in totals.items() if 0 < count < FEW]
    if few:
        yield f"Fewer than {FEW} pictures of {classes(few)}: add some, or merge classes."
    least, most = (pick(filter(None, totals.values()), default=0) for pick in (min, max))
    if least and most >= UNEVEN * least:
        yield (
            f"The largest class has {most / least:.0f} times the pictures of the smallest: judge "
            "by accuracy per class, not overall."
        )


def same_but_for_spelling(names: Sequence[str]) -> list[list[str]]:
    """Names that a careless hand may have made of one."""
    alike: dict[str, list[str]] = defaultdict(list)
    for name in names:
        alike["".join(name.casefold().split())].append(name)
    return [group for group in alike.values() if len(group) > 1]


def there(count: int, thing: str) -> str:
    """`1 picture is`, `2 pictures are`."""
    return f"{count:,} {thing} is" if count == 1 else f"{count:,} {thing}s are"


def classes(names: Sequence[str]) -> str:
    return f"class {listed(names)}" if len(names) == 1 else f"classes {listed(names)}"


def listed(names: Sequence[str]) -> str:
    """`'a' and 'b'`, or the first of them and how many more."""
    shown = [repr(name) for name in names[:NAMED]]
    if len(names) > NAMED:
        return f"{', '.join(shown)} and {len(names) - NAMED:,} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else shown[0]

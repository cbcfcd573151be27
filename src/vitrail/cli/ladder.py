"""`vitrail finetune --ladder`: every step from a probe to full fine-tuning, and which paid."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vitrail.cli.live import Live
from vitrail.cli.text import MANNER, paragraph, printable
from vitrail.formatting import duration, percent

if TYPE_CHECKING:
    from vitrail.training.ladder import Climb
    from vitrail.training.rungs import Rung
    from vitrail.training.setup import Order

NAME, NUMBER, TIME = 18, 9, 14  # columns


class Views(Live):
    """A view of one run after the other."""

    def begin(self, step: int, steps: int) -> None:
        self.losses, self.verdicts, self.row = [], [], {}
        super().begin(step, steps)


def run_ladder(order: "Order", *, rate: float | None, begun: float, as_json: bool) -> bool:
    """Climb and tell; whether it came to its end."""
    from vitrail.training.ladder import climb

    with Views(aside=as_json) as view:
        found = climb(order, view, rate=rate, begun=begun)
    if as_json:
        print(json.dumps(found.to_dict(), indent=1))
        return found.finished
    for line in report(found):
        print(printable(line))
    return found.finished


def report(climb: "Climb") -> Iterator[str]:
    """The table, which step paid, and what to type next; in 80 columns."""
    yield ""
    yield f"{'step':{NAME}}{'dev':>{NUMBER}}{'gain':>{NUMBER}}{'time':>{TIME}}   learning rates"
    for rung in climb.rungs:
        yield from row(climb, rung)
    yield ""
    whence = "the split val" if climb.dev == "val" else "cut out of train"
    yield from paragraph(f"{verdict(climb)}. dev is {climb.pictures:,} pictures, {whence}.")
    yield ""
    if not climb.finished:
        yield "stopped in the run on all training pictures; nothing is lost. To go on:"
        yield f"  vitrail finetune --resume --out {climb.folder}"
        return
    for split, outcome in climb.outcomes.items():
        right = percent(outcome.accuracy)
        yield f"{split}: {right} of {outcome.samples:,} pictures are named rightly"
    yield f"done in {duration(climb.seconds)}: {climb.folder}"
    if not MANNER.quiet:
        yield ""
        yield "Next:"
        yield f"  vitrail evaluate {climb.folder} {climb.data}"


def row(climb: "Climb", rung: "Rung") -> Iterator[str]:
    """`attention-only     94.0 %     +2.8    3 min 10 s   0.0002 best of 3`, and what failed."""
    gain = climb.gain(rung)
    numbers = (
        f"{percent(rung.accuracy):>{NUMBER}}"
        f"{'' if gain is None else f'{100 * gain:+.1f}':>{NUMBER}}{duration(rung.seconds):>{TIME}}"
    )
    tried = [trial for trial in rung.trials if trial.accuracy is not None]
    best = f"   {rung.rate:g}" if tried else ""
    best += f", the best of {len(tried)}" if len(tried) > 1 else ""
    yield f"{rung.name:{NAME}}{numbers}{best}"
    if rung.problem and not rung.trials:
        yield from paragraph(f"  {rung.problem}", 4)
    for trial in rung.trials:
        if trial.problem:
            yield from paragraph(f"  learning rate {trial.rate:g}: {trial.problem}", 4)


def verdict(climb: "Climb") -> str:
    """`attention-only paid: 91.2 -> 94.0 % for 3 min 10 s; full fine-tuning did not (93.6 %)`"""
    first, *others = (rung for rung in climb.rungs if rung.accuracy is not None)
    words = []
    for rung in others:
        before, gain = climb.before(rung), climb.gain(rung)
        assert before is not None, "the first step comes before"
        if gain and gain > 0:
            change = f"{percent(before).removesuffix(' %')} -> {percent(rung.accuracy)}"
            words.append(f"{rung.name} paid: {change} for {duration(rung.seconds)}")
        else:
            words.append(f"{rung.name} did not pay ({percent(rung.accuracy)})")
    words += [f"{rung.name} was not tried" for rung in climb.rungs if rung.accuracy is None]
    return "; ".join([f"{first.name}: {percent(first.accuracy)}", *words])

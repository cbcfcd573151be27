"""`vitrail finetune --ladder`: every step from a probe to full fine-tuning, and which paid."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vitrail.cli.live import Live
from vitrail.cli.text import MANNER, accuracy_line, paragraph, printable
from vitrail.formatting import duration, percent

if TYPE_CHECKING:
    from vitrail.training.adapt import Candidate, SearchResult
    from vitrail.training.config import RunConfig

NAME, NUMBER, TIME = 18, 9, 14  # columns


class Views(Live):
    """A view of one run after the other."""

    def on_train_begin(self, step: int, steps: int) -> None:
        self.losses, self.verdicts, self.row = [], [], {}
        super().on_train_begin(step, steps)


def run_ladder(config: "RunConfig", *, rate: float | None, started: float, as_json: bool) -> bool:
    """Climb and tell; whether it came to its end."""
    from vitrail.training.adapt import search

    with Views(aside=as_json) as view:
        found = search(config, view, rate=rate, started=started)
    if as_json:
        print(json.dumps(found.to_dict(), indent=1))
        return found.finished
    for line in report(found):
        print(printable(line))
    return found.finished


def report(result: "SearchResult") -> Iterator[str]:
    """The table, which step paid, and what to type next; in 80 columns."""
    yield ""
    yield f"{'step':{NAME}}{'dev':>{NUMBER}}{'gain':>{NUMBER}}{'time':>{TIME}}   learning rates"
    for candidate in result.candidates:
        yield from row(result, candidate)
    yield ""
    whence = "the split val" if result.dev == "val" else "cut out of train"
    yield from paragraph(f"{verdict(result)}. dev is {result.images:,} pictures, {whence}.")
    yield ""
    if not result.finished:
        yield "stopped in the run on all training pictures; nothing is lost. To go on:"
        yield f"  vitrail finetune --resume --out {result.folder}"
        return
    for split, outcome in result.outcomes.items():
        yield accuracy_line(split, outcome)
    yield f"done in {duration(result.seconds)}: {result.folder}"
    if not MANNER.quiet:
        yield ""
        yield "Next:"
        yield f"  vitrail evaluate {result.folder} {result.data}"


def row(result: "SearchResult", candidate: "Candidate") -> Iterator[str]:
    """`attention-only     94.0 %     +2.8    3 min 10 s   0.0002 best of 3`, and what failed."""
    gain = result.gain(candidate)
    numbers = (
        f"{percent(candidate.accuracy):>{NUMBER}}"
        f"{'' if gain is None else f'{100 * gain:+.1f}':>{NUMBER}}"
        f"{duration(candidate.seconds):>{TIME}}"
    )
    tried = [trial for trial in candidate.trials if trial.accuracy is not None]
    best = f"   {candidate.learning_rate:g}" if tried else ""
    best += f", the best of {len(tried)}" if len(tried) > 1 else ""
    yield f"{candidate.name:{NAME}}{numbers}{best}"
    if candidate.problem and not candidate.trials:
        yield from paragraph(f"  {candidate.problem}", 4)
    for trial in candidate.trials:
        if trial.problem:
            yield from paragraph(f"  learning rate {trial.learning_rate:g}: {trial.problem}", 4)


def verdict(result: "SearchResult") -> str:
    """`attention-only paid: 91.2 -> 94.0 % for 3 min 10 s; full fine-tuning did not (93.6 %)`"""
    first, *others = (c for c in result.candidates if c.accuracy is not None)
    words = []
    for candidate in others:
        before, gain = result.best_before(candidate), result.gain(candidate)
        assert before is not None, "the first step comes before"
        if gain and gain > 0:
            change = f"{percent(before).removesuffix(' %')} -> {percent(candidate.accuracy)}"
            words.append(f"{candidate.name} paid: {change} for {duration(candidate.seconds)}")
        else:
            words.append(f"{candidate.name} did not pay ({percent(candidate.accuracy)})")
    words += [f"{c.name} was not tried" for c in result.candidates if c.accuracy is None]
    return "; ".join([f"{first.name}: {percent(first.accuracy)}", *words])

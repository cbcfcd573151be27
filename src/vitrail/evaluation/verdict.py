"""Findings in plain words: how often right, what its confidence is worth, and what is weak.

Sentences are plain text, with commands between backticks.
"""

import math
from collections.abc import Iterator

import numpy as np

from vitrail.evaluation.diagrams import at_share, occupied
from vitrail.evaluation.findings import Calibration, ClassFinding, Findings
from vitrail.evaluation.matrix import most_confused, often
from vitrail.evaluation.measures import COVERAGE
from vitrail.formatting import percent

COUNTED = 100  # pictures below which they are counted, not projected to a hundred
FAIR = 0.01  # a mean gap nobody needs to mend
HELPS = 0.005  # what leaving out the unsure fifth must gain to be worth a word
SAVE = "`vitrail evaluate … --save-temperature`"


def verdict(findings: Findings) -> Iterator[str]:
    """What somebody who reads nothing else should know."""
    yield how_often_right(findings)
    if findings.calibration is not None and findings.calibration.counts.any():
        yield how_sure(findings.calibration)
    if findings.selective is not None and len(findings.selective.coverage):
        yield from without_the_unsure(on_surest(findings), findings.accuracy)
    yield from weakest(findings)


def how_often_right(findings: Findings) -> str:
    """`It is right 93 times of 100.`"""
    subject = "The class it is surest of applies" if several_apply(findings) else "It is right"
    right, samples = round(findings.accuracy * findings.samples), findings.samples
    if right == samples and samples != 1:
        return f"{subject} every time, on {samples:,} pictures."
    if samples < COUNTED:
        return f"{subject} on {right} of {samples} {'picture' if samples == 1 else 'pictures'}."
    return f"{subject} {times_of(findings.accuracy)}."


def several_apply(findings: Findings) -> bool:
    return any(found.average_precision is not None for found in findings.classes)


def times_of(value: float) -> str:
    """93 times of 100; 996 times of 1,000 where a hundred would say always."""
    for whole in (100, 1_000, 10_000):
        times = round(value * whole)
        if 0 < times < whole:
            return f"{times:,} times of {whole:,}" if times > 1 else f"once of {whole:,}"
    return "every time" if value > 0.5 else "never"


def how_sure(calibration: Calibration) -> str:
    """Whether its confidence can be believed; if not, an example, and what would mend it."""
    bins = occupied(calibration)
    counts = calibration.counts[bins]
    gaps = calibration.confidence[bins] - calibration.accuracy[bins]
    if not calibration.ece > max(FAIR, gap_of_luck(calibration)):
        luck = ", which so few pictures may do by chance" if calibration.ece > FAIR else ""
        return (
            "When it says how sure it is, it can be believed: "
            f"confidence and accuracy differ by {percent(calibration.ece)} on average{luck}."
        )
    mean = float((counts * gaps).sum() / counts.sum())
    sign = 1 if mean > 0 else -1
    worst = bins[int(np.argmax(counts * gaps * sign))]
    sure, right = float(calibration.confidence[worst]), float(calibration.accuracy[worst])
    said = f"{100 * sure:.0f} %" if sure < 0.985 else percent(sure)
    judged = "too sure" if sign > 0 else "not sure enough"
    if abs(mean) < calibration.ece / 2:
        judged = f"{judged} there, and the reverse elsewhere"
    return (
        f"When it says it is {said} sure, it is right {times_of(right)}: "
        f"it is {judged}{mended(calibration)}."
    )


def gap_of_luck(calibration: Calibration) -> float:
    """The calibration error that a model without any shows at most, 19 times of 20.

    A bin of n predictions with confidence c then has an accuracy around c with variance c(1-c)/n;
    the error is a weighted sum of these distances, each half-normal.
    """
    bins = occupied(calibration)
    counts, sure = calibration.counts[bins], calibration.confidence[bins]
    spread = np.sqrt(sure * (1 - sure) / counts) * counts / counts.sum()
    mean = math.sqrt(2 / math.pi) * spread.sum()
    return float(mean + 1.645 * math.sqrt((1 - 2 / math.pi) * (spread**2).sum()))


def mended(calibration: Calibration) -> str:
    left, ece = calibration.ece_scaled, calibration.ece
    if not (left < 0.9 * ece and math.isfinite(calibration.temperature)):
        return ""
    much = "most" if left < 0.5 * ece else "some"
    by = f"{calibration.temperature:.2g}"
    return f"; dividing its logits by {by} would mend {much} of that: {SAVE}"


def on_surest(findings: Findings) -> float:
    """The accuracy on the surest 80 %: the exact one, or else that of the curve."""
    if "accuracy_at_80" in findings.estimates:
        return findings.estimates["accuracy_at_80"].value
    assert findings.selective is not None, "asked where there is a curve"
    return at_share(findings.selective, COVERAGE)


def without_the_unsure(rest: float, accuracy: float) -> Iterator[str]:
    """What it gains to answer only where it is sure."""
    if not math.isfinite(rest) or accuracy == 1:
        return
    if rest - accuracy >= HELPS or rest == 1:
        left_out = "If it may leave out the fifth it is least sure of"
        yield f"{left_out}, {'all' if rest == 1 else percent(rest)} of the rest are right."
    else:
        yield (
            f"Leaving out the fifth it is least sure of hardly helps ({percent(rest)} of the "
            "rest are right): its mistakes are not where it is unsure."
        )


def weakest(findings: Findings) -> Iterator[str]:
    """The class it finds least often, and the classes it mixes up most often."""
    missed = [found for found in findings.classes if found.recall < 1]
    if missed:
        least = min(missed, key=lambda found: (found.recall, -found.pictures))
        yield f"It finds “{least.name}” least often: {found_of(least)}."
    confusion = findings.outcome.confusion
    for pair in [] if confusion is None else most_confused(confusion, 1):
        truth, predicted = findings.classes[pair.truth].name, findings.classes[pair.predicted].name
        yield (
            f"It takes “{truth}” for “{predicted}” most often: {often(pair.times)}, which is "
            f"{100 * pair.share:.0f} % of the pictures of “{truth}”."
        )


def found_of(found: ClassFinding) -> str:
    return f"{round(found.recall * found.pictures):,} of {found.pictures:,}"

"""An evaluation as one page: how good the model is, what its confidence is worth, where it errs.

    write_evaluation(folder / "evaluation.html", findings, title="…", facts={…}, source=source)

The page asks nothing of the network and runs no script: pictures, charts and style are inside it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from vitrail.data.files import write_whole
from vitrail.data.samples import Source
from vitrail.evaluation import diagrams
from vitrail.evaluation.charts import tidy
from vitrail.evaluation.diagrams import at_share, reliability, trade_off
from vitrail.evaluation.findings import Calibration, ClassFinding, Estimate, Findings, Selective
from vitrail.evaluation.matrix import mixed_up
from vitrail.evaluation.parts import (
    likely,
    mistake_figures,
    prose,
    share,
    tile,
    tiles_and_facts,
    unreadable,
    whole_page,
)
from vitrail.evaluation.verdict import on_surest, several_apply, verdict
from vitrail.formatting import ABSENT

STYLE = """
.tiles { grid-template-columns: repeat(auto-fit, minmax(min(100%, 9.4rem), 1fr)); }
.tile { padding: .8rem .75rem .9rem; }
.tile span { font-size: .8rem; }
@media (max-width: 30rem) { .tile.first { grid-column: 1 / -1; } }
.classes { width: 100%; max-width: 44rem; }
.classes th { color: var(--soft); font-weight: 400; font-size: .85rem; }
.classes th, .classes td { white-space: nowrap; }
.classes td:first-child { white-space: normal; min-width: 5rem; }
.classes tr > :last-child { padding-right: 0; }
@media (max-width: 30rem) { .classes th, .classes td { padding-right: .45rem; font-size: .8rem; } }
.classes .amount { background: linear-gradient(to top, var(--good) 3px, transparent 3px)
  no-repeat left bottom / var(--part) 100%; }
.classes .low { background-image: linear-gradient(to top, var(--bad) 3px, transparent 3px); }
.legend { list-style: none; margin: .75rem 0; padding: 0; }
.legend li { margin: .2rem 0; }
.swatch { display: inline-block; width: .9rem; height: .9rem; border-radius: 2px;
  margin-right: .5rem; vertical-align: -.1rem; }
.swatch.right { background: var(--good); opacity: .8; }
.swatch.over { background: var(--bad); opacity: .45; }
.swatch.under { background: var(--s2); opacity: .5; }
.swatch.sure { background: var(--ink); height: 2px; border-radius: 0; vertical-align: .25rem; }
.panels .facts { margin-top: 1rem; }
"""
TILES = {  # estimate → its name on the page, and what it is
    "accuracy": ("accuracy", ""),
    "real_accuracy": ("ReaL accuracy", "by labels that people checked again"),
    "top5": ("top 5", "the right class is among its five likeliest"),
    "balanced_accuracy": ("balanced accuracy", "every class counts the same"),
    "ece": ("calibration error", "between how sure and how right it is"),
    "accuracy_at_80": ("on its surest 80 %", "accuracy if it leaves out the others"),
}
SEVERAL_TILES = {  # the same where several classes may apply
    "mean_average_precision": ("mAP", "mean over classes of the average precision"),
    "f1_micro": ("F1 micro", "every label counts the same"),
    "f1_macro": ("F1 macro", "every class counts the same"),
}
FOLDED = 30  # classes beyond which their table is folded
ENOUGH = 20  # pictures from which on the accuracy of the surest says something


def write_evaluation(
    path: Path,
    findings: Findings,
    *,
    title: str,
    facts: Mapping[str, str],
    source: Source,
) -> None:
    """Write the page whole, or leave what was there."""
    write_whole(path, page(findings, title, facts, source))


def page(findings: Findings, title: str, facts: Mapping[str, str], source: Source) -> str:
    """The page as text; nothing in it points outside."""
    names = [found.name for found in findings.classes]
    body = [tiles_and_facts(list(tiles(findings)), {**facts, **more_facts(findings)})]
    body += [
        sentences("choices soft", findings.notes),
        sentences("verdict", list(verdict(findings))),
    ]
    if findings.outcome.confusion is not None and names:
        body += ["<h2>Which classes are mixed up</h2>", mixed_up(findings.outcome.confusion, names)]
    body.append(class_table(findings.classes))
    if findings.calibration is not None:
        body.append(calibrated(findings.calibration))
    if findings.selective is not None and findings.accuracy < 1:
        body.append(selected(findings.selective, on_surest(findings), findings.samples))
    if findings.outcome.mistakes:
        body.append("<h2>Most confident mistakes</h2>")
        body.append(mistake_figures(findings.outcome.mistakes, source, names))
    body.append(unreadable(findings.outcome.skipped))
    return whole_page(title, facts, body, diagrams.STYLE + STYLE)


def tiles(findings: Findings) -> Iterator[str]:
    """The numbers by which models are compared, with their intervals."""
    wanted = SEVERAL_TILES if several_apply(findings) else TILES
    known = {key: findings.estimates[key] for key in wanted if key in findings.estimates}
    if wanted is TILES and "accuracy" not in known:
        known = {"accuracy": Estimate(findings.accuracy, math.nan, math.nan)} | known
    for key, estimate in known.items():
        name, note = wanted[key]
        if key == "accuracy":
            right = round(findings.accuracy * findings.samples)
            note = f"{right:,} of {findings.samples:,} right"
        below = f"{likely(estimate.low, estimate.high)}<span>{note}</span>"
        yield tile(name, share(estimate.value), below, first=key == next(iter(wanted)))


def more_facts(findings: Findings) -> dict[str, str]:
    return {
        "pictures": f"{findings.samples:,}",
        "classes": f"{len(findings.classes):,}",
        "loss": plain(findings.outcome.loss),
    }


def plain(value: float) -> str:
    return tidy(value) if math.isfinite(value) else ABSENT


def sentences(kind: str, lines: Sequence[str]) -> str:
    listed = "".join(f"<li>{prose(line)}</li>" for line in lines)
    return f'<ul class="{kind}">{listed}</ul>' if lines else ""


def class_table(classes: Sequence[ClassFinding]) -> str:
    """Every class, the worst first; those without pictures last."""
    if not classes:
        return ""
    ranked = any(found.average_precision is not None for found in classes)
    head = ["class", "pictures", "precision", "recall", "F1", *(["AP"] if ranked else [])]
    heads = "".join(f'<th scope="col">{name}</th>' for name in head)
    order = sorted(
        classes, key=lambda found: (not found.pictures or math.isnan(found.f1), found.f1)
    )
    rows = "\n".join(class_row(found, ranked) for found in order)
    table = (
        f'<div class="wide" tabindex="0"><table class="classes"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )
    if len(classes) > FOLDED:
        summary = f"All {len(classes):,} classes, worst first"
        table = f"<details><summary>{summary}</summary>{table}</details>"
    words = (
        "Precision: of the pictures taken for the class, the share that is right. "
        "Recall: of its pictures, the share that is found. F1 lies between the two."
    )
    if ranked:
        words += (
            " AP, the average precision: how well its pictures come before all others. "
            "A picture is taken for every class that is likelier than not."
        )
    return f'<h2>Each class</h2>{table}<p class="soft">{words}</p>'


def class_row(found: ClassFinding, ranked: bool) -> str:
    cells = [f"{found.pictures:,}", share(found.precision), share(found.recall)]
    before = "".join(f"<td>{cell}</td>" for cell in cells)
    return f"<tr><td>{escape(found.name)}</td>{before}{amount(found.f1)}" + (
        f"{amount(math.nan if found.average_precision is None else found.average_precision)}</tr>"
        if ranked
        else "</tr>"
    )


def amount(value: float) -> str:
    """A cell with a line as long as its share."""
    if math.isnan(value):
        return f"<td>{ABSENT}</td>"
    low = "" if value >= 0.5 else " low"
    return f'<td class="amount{low}" style="--part:{100 * value:.1f}%">{share(value)}</td>'


def calibrated(calibration: Calibration) -> str:
    """The reliability diagram, how to read it, and the numbers that go with it."""
    facts = {
        "calibration error": share(calibration.ece),
        "best temperature": plain(calibration.temperature),
        "error with it": share(calibration.ece_scaled),
        "Brier score": plain(calibration.brier),
    }
    return section(
        "Is it as sure as it is right?",
        reliability(calibration),
        "<p>Answers are sorted into bars by how sure the model was. A bar is as high as the share "
        "of them that was right; where its confidence can be believed, bars end at the dotted "
        "diagonal.</p>"
        '<ul class="legend"><li><i class="swatch right"></i>how often it was right</li>'
        '<li><i class="swatch sure"></i>how sure it was, on average</li>'
        '<li><i class="swatch over"></i>the gap where it is too sure</li>'
        '<li><i class="swatch under"></i>the gap where it is not sure enough</li></ul>'
        f'<p class="soft">A pale bar stands for fewer than {diagrams.FEW} answers.</p>',
        facts,
    )


def selected(selective: Selective, surest: float, samples: int) -> str:
    """The trade between answering all and being right."""
    chart = trade_off(selective, surest, least=min(ENOUGH / samples, 0.5))
    if not chart:
        return ""
    facts = {
        "surest 50 %": share(at_share(selective, 0.5)),
        "surest 80 %": share(surest),
        "surest 90 %": share(at_share(selective, 0.9)),
        "all of them": share(at_share(selective, 1.0)),
    }
    return section(
        "What if it may leave some out?",
        chart,
        "<p>The pictures are sorted by how sure the model is. At the right it answers all of them; "
        "further left only those it is surest of, and the others would be left to a person. "
        "A curve that rises to the left means that its confidence tells good answers from bad "
        "ones.</p>",
        facts,
    )


def section(title: str, chart: str, text: str, facts: Mapping[str, str]) -> str:
    """A chart with its explanation beside it; all but the title is HTML."""
    listed = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts.items())
    return (
        f'<h2>{title}</h2><div class="panels"><div class="narrow">{chart}</div>'
        f'<div>{text}<dl class="facts">{listed}</dl></div></div>'
    )

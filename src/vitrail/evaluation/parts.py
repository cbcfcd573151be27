"""What pages about a model share: tiles, facts, pictures of mistakes, and the words around them.

Arguments that are called `html` stand in the page as they are; all others are escaped here.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from vitrail.data.samples import Label, Source
from vitrail.data.sheet import PAGE, policy_hash
from vitrail.data.thumbnails import picture_at
from vitrail.evaluation import charts
from vitrail.evaluation.outcome import Mistake
from vitrail.formatting import percent

STYLE = """
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 10.5rem), 1fr));
  gap: .75rem; margin: 1.25rem 0; }
.tile { background: var(--card); border-radius: 8px; padding: .8rem 1rem .9rem; }
.tile b { display: block; font-size: clamp(1.3rem, 4.5vw, 1.9rem); line-height: 1.25;
  overflow-wrap: normal; letter-spacing: -.02em;
  font-variant-numeric: tabular-nums; font-weight: 650; }
.tile.first { border-left: 4px solid var(--accent); }
.tile.first b { color: var(--accent); }
.tile span { display: block; color: var(--soft); font-size: .85rem; line-height: 1.4; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 9.5rem), 1fr));
  gap: .6rem 1.25rem; }
.facts dt { color: var(--soft); font-weight: 400; font-size: .85rem; }
.facts dd { color: var(--ink); margin: 0; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr));
  gap: 1rem 2rem; align-items: start; }
.panels h3 { margin: .75rem 0 .5rem; }
.narrow { max-width: 27rem; }
.wide + .soft { margin-top: .5rem; }
.pairs { list-style: none; margin: 0; padding: 0; }
.pairs li { display: flex; justify-content: space-between; gap: 1rem; padding: .3rem 0;
  border-bottom: 1px solid var(--line); }
.pairs span { color: var(--soft); white-space: nowrap; font-variant-numeric: tabular-nums; }
.mistakes { display: grid; grid-template-columns: repeat(auto-fill, minmax(7.6rem, 1fr));
  gap: 1.1rem .9rem; }
@media (max-width: 30rem) { .mistakes { grid-template-columns: repeat(3, 1fr); gap: .8rem .6rem; } }
.mistakes figure { width: auto; }
.mistakes img { width: 100%; aspect-ratio: 1; object-fit: contain; background: var(--card);
  border-radius: 6px; }
.mistakes b { color: var(--ink); }
.mistakes i { font-style: normal; color: var(--bad); font-weight: 600; }
.choices { padding-left: 1.2rem; } .choices li { margin: .3rem 0; }
summary { cursor: pointer; font-weight: 600; padding: .4rem 0; }
pre { background: var(--card); border-radius: 6px; padding: .75rem 1rem; overflow-x: auto;
  overflow-wrap: normal; font-size: .85rem; line-height: 1.5; margin: .5rem 0; }
code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: .92em; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 3px; border-radius: 3px; }
"""
SIDE = 144  # pixels of the longer side of a mistake's picture
SHOWN = 30  # unreadable files by name; the rest is counted


def whole_page(
    title: str,
    facts: Mapping[str, str],
    body: Iterable[str],
    more_style: str = "",
    script: str = "",
) -> str:
    """The page as text, of those sections that are not empty; nothing in it points outside."""
    subtitle = " on ".join(facts[name] for name in ("model", "data") if name in facts)
    last = f"<script>{script}</script>" if script else ""
    return PAGE.substitute(
        title=escape(title),
        facts=escape(subtitle),
        body="\n".join(filter(None, [*body, last])),
        more_style=charts.STYLE + STYLE + more_style,
        more_policy=only(script) if script else "",
    )


def only(script: str) -> str:
    """What is added to a page's policy so that this script may run, and no other."""
    return f"; script-src {policy_hash(script)}"


def tile(name: str, html: str, below: str = "", *, first: bool = False) -> str:
    """A value in large type; `below` are lines of HTML."""
    kind = "tile first" if first else "tile"
    return f'<div class="{kind}"><span>{escape(name)}</span><b>{html}</b>{below}</div>'


def tiles_and_facts(tiles: Sequence[str], facts: Mapping[str, str]) -> str:
    """What everybody wants to know first, in large type, and the other facts below."""
    others = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in facts.items()
    )
    found = f'<div class="tiles">{"".join(tiles)}</div>' if tiles else ""
    return f'{found}<dl class="facts">{others}</dl>' if others else found


def likely(low: float, high: float) -> str:
    """The line of a tile that says where its value lies 19 times of 20, where that is known."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return ""
    least = percent(low).removesuffix(" %")
    return f'<span title="95 % interval">likely {least} to {share(high)}</span>'


def mistake_figures(mistakes: Sequence[Mistake], source: Source, names: Sequence[str]) -> str:
    figures = "".join(mistake_figure(mistake, source, names) for mistake in mistakes)
    return f'<div class="mistakes">{figures}</div>'


def mistake_figure(mistake: Mistake, source: Source, names: Sequence[str]) -> str:
    truth, predicted = escape(called(mistake.label, names)), escape(names[mistake.predicted])
    small = picture_at(source, mistake.index, SIDE)
    image = f'<img alt="{truth}, taken for {predicted}" src="{small}">' if small else ""
    sure = "" if math.isnan(mistake.confidence) else f" ({100 * mistake.confidence:.0f}&nbsp;%)"
    return (
        f'<figure title="{escape(mistake.name)}">{image}<figcaption><b>{truth}</b><br>'
        f"taken for <i>{predicted}</i>{sure}</figcaption></figure>"
    )


def called(label: Label, names: Sequence[str]) -> str:
    if isinstance(label, tuple):
        return ", ".join(names[number] for number in label) or "none"
    return names[label]


def following(steps: Sequence[str]) -> str:
    """Commands stand alone, to be copied; sentences as they are."""
    lines = [
        f"<pre><code>{escape(step)}</code></pre>"
        if step.startswith("vitrail ")
        else f"<p>{prose(step)}</p>"
        for step in steps
    ]
    return f"<h2>What next</h2>{''.join(lines)}" if lines else ""


def prose(text: str) -> str:
    """Escaped text, with what stands between backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def share(value: float) -> str:
    """`percent` in HTML, which is not torn apart at the end of a line."""
    return percent(value).replace(" ", "&nbsp;")


def unreadable(bad: Mapping[str, str]) -> str:
    """Files that could not be read, and why."""
    if not bad:
        return ""
    lines = [
        f"<dt>{escape(name)}</dt><dd>{escape(why)}</dd>" for name, why in list(bad.items())[:SHOWN]
    ]
    more = f'<p class="soft">and {len(bad) - SHOWN:,} more</p>' if len(bad) > SHOWN else ""
    title = f"Files that could not be read ({len(bad):,})"
    return f"<h2>{title}</h2><dl>{''.join(lines)}</dl>{more}"

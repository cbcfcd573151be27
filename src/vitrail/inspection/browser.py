"""The attention browser of the page: choose a picture, a layer, a head and a patch, and see where
that patch looks.

A picture's attention stands in the page as base64 of uint8 (L, H, T, T), patches last, each row
scaled to its largest value. The script divides a row by its sum, so that shares are shares again,
and decodes a picture only when it is chosen. Everything is counted from 0, as in the arrays.
"""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from vitrail.inspection.findings import Look

MOST_BYTES = 9 * 2**20  # of attention in one page; base64 makes them a third more

STYLE = """
.browser { margin-top: 1rem; }
.choose { display: flex; gap: .5rem; overflow-x: auto; padding: 5px; margin: 0 -5px 1rem; }
.choose button { flex: none; padding: 0; border: 0; border-radius: 6px; background: none;
  cursor: pointer; line-height: 0; opacity: .6; }
.choose button[aria-pressed="true"] { opacity: 1; outline: 3px solid var(--accent); }
.choose img { height: 4rem; width: auto; max-width: 8rem; object-fit: cover; border-radius: 6px; }
.desk { display: grid; gap: 1.25rem 2rem; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); }
.stage { position: relative; overflow: hidden; border-radius: 8px; background: var(--card);
  line-height: 0; }
.stage img { width: 100%; filter: grayscale(1) brightness(.62); }
.field { position: absolute; cursor: crosshair; box-shadow: 0 0 0 100vmax rgb(0 0 0 / .45);
  touch-action: manipulation; user-select: none; }
.field:focus-visible { outline-offset: -3px; }
.heat { width: 100%; height: 100%; image-rendering: pixelated; }
.query, .cell { position: absolute; border: 2px solid #fff; border-radius: 2px;
  box-shadow: 0 0 0 1.5px #000, inset 0 0 0 1px #000; pointer-events: none; }
.told { min-height: 3em; margin: .75rem 0; }
.others { display: flex; flex-wrap: wrap; gap: .5rem; margin-top: .75rem; }
.others button { font: inherit; font-size: .9rem; color: var(--ink); background: var(--card);
  border: 1px solid var(--line); border-radius: 99px; padding: .25rem .8rem; cursor: pointer; }
.others button[aria-pressed="true"] { border-color: var(--accent);
  box-shadow: inset 0 0 0 1px var(--accent); }
.others span { color: var(--soft); }
.knob { display: grid; grid-template-columns: 1fr auto; margin-bottom: .75rem; }
.knob output { font-weight: 600; font-variant-numeric: tabular-nums; }
.knob input { grid-column: 1 / -1; width: 100%; height: 1.75rem; margin: 0;
  accent-color: var(--accent); cursor: pointer; }
.labeled { display: grid; grid-template-columns: auto 1fr; gap: .25rem .4rem; font-size: .7rem;
  line-height: 1; color: var(--soft); font-variant-numeric: tabular-nums; overflow-wrap: normal; }
.across { grid-column: 2; display: grid; grid-auto-flow: column; grid-auto-columns: minmax(0, 1fr);
  text-align: center; }
.down { display: grid; grid-auto-rows: minmax(0, 1fr); align-items: center; text-align: right; }
.all { position: relative; line-height: 0; cursor: pointer; border-radius: 4px; overflow: hidden; }
[hidden] { display: none !important; }
.overview { width: 100%; image-rendering: pixelated; }
.scale { display: flex; align-items: center; gap: .6rem; }
.scale i { flex: 0 1 9rem; height: .6rem; border-radius: 99px;
  background: linear-gradient(to right, #44403c, #9a3412, #fb923c, #fef08a); }
"""


@dataclass(frozen=True)
class Shown:
    """A picture to choose: what was seen of it, and its small picture as an address."""

    look: Look
    address: str


def browsable(looks: Sequence[Look]) -> list[Look]:
    """Those with attention, as many as one page holds."""
    found, room = [], MOST_BYTES
    for look in looks:
        if look.attention is not None and look.attention.nbytes <= room:
            found.append(look)
            room -= look.attention.nbytes
    return found


def browser(shown: Sequence[Shown], prefix: Sequence[str]) -> str:
    """The browser's markup and data, for the script to bring to life."""
    buttons = "".join(
        f'<button type="button" aria-pressed="{str(not number).lower()}">'
        f'<img alt="{escape(one.look.name)}" src="{one.address}"></button>'
        for number, one in enumerate(shown)
    )
    about = json.dumps([described(one.look, prefix) for one in shown])
    about = about.replace("<", r"\u003c")  # a name cannot end the element
    data = "".join(
        f'<script type="text/plain" id="attention-{number}">{encoded(one.look.attention)}</script>'
        f'<script type="text/plain" id="peaks-{number}">{encoded(one.look.peaks)}</script>'
        for number, one in enumerate(shown)
    )
    return f"""<div class="browser" id="browser">
<div class="choose" role="group" aria-label="picture">{buttons}</div>
<div class="desk"><div>
<div class="stage"><img alt="{escape(shown[0].look.name)}" src="{shown[0].address}">
<div class="field" tabindex="0" role="application" aria-describedby="told"
  aria-label="patches of the picture: arrow keys choose the one that is asked">
<canvas class="heat" aria-hidden="true"></canvas><i class="query"></i></div></div>
<div class="others" role="group" aria-label="tokens that are no patches"></div>
<p class="told" id="told" role="status" aria-live="polite"></p>
<div class="scale soft">looks least <i></i> most</div>
</div><div>
<div class="knob"><label for="layer">Layer</label><output for="layer"></output>
<input class="layer" id="layer" type="range" min="0" max="0" value="0" /></div>
<div class="knob"><label for="head">Head</label><output for="head"></output>
<input class="head" id="head" type="range" min="-1" max="0" value="-1" /></div>
<div class="labeled"><div class="across" aria-hidden="true"></div>
<div class="down" aria-hidden="true"></div>
<div class="all"><canvas class="overview" role="img"
  aria-label="the same query in every layer and head"></canvas><i class="cell"></i></div></div>
<p class="soft">The same query in every layer, downward, and every head, to the right. Click one to
see it large.</p>
</div></div>
<script type="application/json" id="pictures">{about}</script>
{data}</div>"""


def described(look: Look, others: Sequence[str]) -> dict[str, object]:
    """What the script must know of a picture; the box in shares of the picture's sides."""
    assert look.attention is not None
    layers, heads, tokens, _ = look.attention.shape
    rows, columns = look.grid
    prefix = tokens - rows * columns
    height, width = look.pixels.shape[:2]
    top, left, bottom, right = look.box
    box = [top / height, left / width, (bottom - top) / height, (right - left) / width]
    return {
        "name": look.name,
        "layers": layers,
        "heads": heads,
        "tokens": tokens,
        "prefix": prefix,
        "rows": rows,
        "columns": columns,
        "gap": 1 + columns // 12,  # pixels between the maps of the overview
        "middle": prefix + rows // 2 * columns + columns // 2,
        "box": [round(part, 5) for part in box],
        "others": list(others),
    }


def encoded(values: np.ndarray | None) -> str:
    """The numbers of an array, as a script can read them."""
    assert values is not None
    return base64.b64encode(values.tobytes()).decode("ascii")

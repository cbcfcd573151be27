"""Self-contained HTML pages from Jinja2 templates.

Autoescape is on: only `Markup` enters a page as it is. Pages request nothing from the network and
follow the reader's light or dark color scheme.
"""

import base64
import hashlib
import math
import re
from collections.abc import Mapping
from functools import cache
from html import escape
from typing import TYPE_CHECKING, Any

from vitrail.formatting import ABSENT, percent

if TYPE_CHECKING:
    from jinja2 import Environment

NBSP = "\N{NO-BREAK SPACE}"

# The palette of all pages and plots. Colors of LIGHT are distinct: SVGs find them by value.
LIGHT = {
    "ink": "#1d1d1f",
    "paper": "#ffffff",
    "soft": "#6b6b70",
    "line": "#dddddd",
    "card": "#f5f5f4",
    "accent": "#9a3412",
    "good": "#0f766f",
    "bad": "#c2410c",
    "track": "#ecebe9",
    "s0": "#9a3413",
    "s1": "#0f766e",
    "s2": "#4f46e5",
    "s3": "#a16207",
    "s4": "#be185d",
}
DARK = {
    "ink": "#e8e8ea",
    "paper": "#161618",
    "soft": "#a0a0a6",
    "line": "#38383c",
    "card": "#212124",
    "accent": "#fdba74",
    "good": "#2dd4bf",
    "bad": "#fb923c",
    "track": "#2c2c30",
    "s0": "#fdba74",
    "s1": "#5eead4",
    "s2": "#a5b4fc",
    "s3": "#fde68a",
    "s4": "#f9a8d4",
}


@cache
def environment() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    env = Environment(
        loader=PackageLoader("vitrail.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.globals.update(light=LIGHT, dark=DARK)
    env.filters.update(
        percent=lambda share: percent(share).replace(" ", NBSP),
        number=lambda value: compact_number(value) if math.isfinite(value) else ABSENT,
        thousands="{:,}".format,
        prose=lambda text: Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))),
        markup=Markup,
    )
    return env


def render(
    template: str, /, title: str, facts: Mapping[str, str], *, script: str = "", **values: Any
) -> str:
    """Render a page. `facts` are shown on it; model and data are also its subtitle.

    `script` is the name of a JavaScript file beside the templates. It is inlined, and the page's
    policy allows it by its hash and nothing else.
    """
    env = environment()
    if script:
        assert env.loader is not None
        script = env.loader.get_source(env, script)[0]
    subtitle = " on ".join(facts[name] for name in ("model", "data") if name in facts)
    return env.get_template(template).render(
        title=title,
        subtitle=subtitle,
        facts=facts,
        script=script,
        script_hash=csp_hash(script) if script else "",
        **values,
    )


def csp_hash(text: str) -> str:
    """Return the source expression of an inline script or style in a Content-Security-Policy."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def interval(low: float, high: float) -> str:
    """`86.3-92.2 %`."""
    return f"{percent(low).removesuffix(' %')}-{percent(high)}"


def compact_number(value: float) -> str:
    """Three significant digits: `0.0123`, `45.6`, `1,230`, `12.3k`, `3e-5`."""
    size = abs(value)
    if size >= 9_999.5:
        unit, sign = (1e6, "M") if size >= 999_500 else (1e3, "k")
        return f"{value / unit:.3g}{sign}"
    if size >= 999.5:
        return f"{value:,.0f}"
    return f"{value:.3g}".replace("e-0", "e-")

"""Self-contained HTML pages from Jinja2 templates.

Autoescape is on: only `Markup` enters a page as it is. Pages request nothing from the network and
follow the reader's light or dark color scheme.
"""

import base64
import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from functools import cache
from html import escape
from typing import TYPE_CHECKING, Any

from vitrail.formatting import ABSENT, percent
from vitrail.reports.figures import DARK, LIGHT
from vitrail.reports.svg import tidy

if TYPE_CHECKING:
    from jinja2 import Environment

NBSP = "\N{NO-BREAK SPACE}"


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
        number=lambda value: tidy(value) if math.isfinite(value) else ABSENT,
        prose=lambda text: Markup(prose(text)),
        markup=Markup,
    )
    return env


def render(template: str, /, title: str, facts: Mapping[str, str], **values: Any) -> str:
    """Render a page. `facts` are shown on it; model and data are also its subtitle."""
    subtitle = " on ".join(facts[name] for name in ("model", "data") if name in facts)
    values = {"extra_style": "", "script": "", "script_hash": ""} | values
    page = environment().get_template(template)
    return page.render(title=title, subtitle=subtitle, facts=facts, **values)


def page(
    title: str,
    facts: Mapping[str, str],
    sections: Iterable[str],
    style: str = "",
    script: str = "",
) -> str:
    """Render a page of sections that are HTML already; the script is allowed by its hash."""
    return render(
        "sections.html",
        title,
        facts,
        sections=[section for section in sections if section],
        extra_style=style,
        script=script,
        script_hash=csp_hash(script) if script else "",
    )


def csp_hash(text: str) -> str:
    """Return the source expression of an inline script or style in a Content-Security-Policy."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def prose(text: str) -> str:
    """Escape text, and turn `code` between backticks into elements."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def percent_html(share: float) -> str:
    """`percent` without a line break before the sign."""
    return percent(share).replace(" ", "&nbsp;")


def interval(low: float, high: float) -> str:
    """`86.3-92.2 %`."""
    return f"{percent(low).removesuffix(' %')}-{percent(high)}"

"""The page of the server: drop a picture, see what the model says and where it looks.

The parts lie in `assets/` as what they are: HTML, CSS and JavaScript. They are put together once,
into one text that asks nothing of any other host; `POLICY` lets the browser hold it to that.
"""

from importlib import resources
from string import Template
from urllib.parse import quote

from vitrail.data.check_page import csp_hash

# Four panes of glass; a browser asks for /favicon.ico if a page has no icon of its own.
ICON = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><rect width="16" height="16"
rx="3" fill="#1a1614"/><path d="M2 2h5v5H2z" fill="#b0183c"/><path d="M9 2h5v5H9z" fill="#de9618"/>
<path d="M2 9h5v5H2z" fill="#1c4ea8"/><path d="M9 9h5v5H9z" fill="#0c7854"/></svg>"""

# In the order in which they are read: one script, so that each knows those before it.
SCRIPTS = ("talk.js", "pictures.js", "glass.js", "state.js")
SCRIPTS += ("incoming.js", "showing.js", "looking.js", "page.js")


def page() -> str:
    """The page at `/`, as text."""
    return PAGE


def asset(name: str) -> str:
    """One of the files that pages are made of."""
    place = resources.files("vitrail.serving") / "assets" / name
    return place.read_text(encoding="utf-8")


def assembled(html: str, *, styles: tuple[str, ...], scripts: tuple[str, ...]) -> tuple[str, str]:
    """A page with its style and script inside, and the policy that allows these and no others."""
    style = "\n".join(map(asset, styles))
    script = "\n".join(map(asset, scripts))
    assert "</script" not in script, "a script that ends its element early is cut short"
    icon = f"data:image/svg+xml,{quote(ICON)}"
    text = Template(asset(html)).substitute(style=style, script=script, icon=icon)
    return text, policy(style, script)


def policy(style: str, script: str) -> str:
    """A Content-Security-Policy for a page with this style and this script in it."""
    return "; ".join(
        (
            "default-src 'none'",
            "connect-src 'self'",
            "img-src 'self' blob: data:",
            f"style-src {csp_hash(style)}",
            f"script-src {csp_hash(script)}",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


PAGE, POLICY = assembled(
    "page.html",
    styles=("base.css", "page.css"),
    scripts=SCRIPTS,
)

"""The page at `/docs`: it reads openapi.json and draws it, with a form to try every route.

The usual pages of this kind load their scripts from elsewhere; this one works without a network.
"""

from vitrail.serving.page import assembled


def docs_page() -> str:
    """The page, as text."""
    return PAGE


PAGE, POLICY = assembled("docs.html", styles=("base.css", "docs.css"), scripts=("docs.js",))

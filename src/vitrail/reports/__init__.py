"""Every HTML page and every chart.

html.py         Jinja2 environment; pages are self-contained and request nothing
templates/      page layout, stylesheet, shared macros, one template per page
figures.py      static plots by matplotlib, as inline SVG, .svg and .png
svg.py          the run page's line chart, which answers hovering
evaluation.py   the page, JSON and CSV of `vitrail evaluate --out`
run.py          the report of a training run
dataset_check.py  the page of `vitrail check --out`
images.py       images as data URLs
"""

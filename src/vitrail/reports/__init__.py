"""Every HTML page and every chart.

html.py           Jinja2 environment and palette; pages are self-contained and request nothing
templates/        page layout, stylesheet, shared macros, one template per page, the script of the
                  attention browser
figures.py        static plots by matplotlib, as inline SVG, .svg and .png
images.py         images as data URLs, heat maps, figures of image tiles
pages.py          the pages of a training run, and of `vitrail evaluate`, `compare` and `check`
inspection.py     the page, figures and arrays of `vitrail inspect`
"""

"""The paper's tables and figures at the scale of a laptop: `vitrail reproduce`.

cells.py       one small run as a value, and its result on disk
workshop.py    many cells on all cores, resumed where they were stopped
report.py      what an experiment says in the end
experiments.py the list of them; each experiment is a file of its own
published.py   the numbers of the paper, as data
figures.py     reports → SVG; page.py reports → Markdown
"""

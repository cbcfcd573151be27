"""The paper's tables and figures at the scale of a laptop: `vitrail reproduce`.

cells.py        one small run as a value, and its result on disk; workshop.py many on all cores
experiments.py  what an experiment is made of; catalog.py all of them, names.py their names
table1.py, table2.py, table5.py, table6.py   those tables; positions.py table 8
set_size.py     figures 3 and 4; compute.py figure 5, scaling.py figure 8, heads.py appendix D.3
looking.py      figures 6 and 11; learned.py figures 7 and 10
carrying.py     fine-tuning at higher resolution, and pre-training by masked patches
models.py       what they share: the small models and their recipe; means.py numbers over seeds,
                structure.py numbers of arrays, subjects.py which models are looked into
orders.py       a run of the paper as a value; paper_runs.py all of them, full.py their check
published.py    the numbers of the paper, as data; measuring.py ours beside them, sizes.py counts
report.py       what an experiment says in the end; page.py in Markdown and in a terminal,
                figures.py its figures, svg.py what they are drawn with
"""

"""The paper's tables and figures at laptop scale: `vitrail reproduce`, from a checkout.

experiments.toml   protocol, small models, grids and the text of reports; small.toml the recipe
published.toml     the numbers of the paper, read by published.py
paper_runs.toml    the paper's own runs, checked by paper_scale.py (`--scale full`)
jobs.py            one training run as a value, and its result; runner.py runs them on all cores
trained.py         experiments that compare models; inspected.py those that look into them
tables.py          tables 1, 2, 5 and 6, with accuracies of given weights
results.py         means over seeds, verdicts, and the reports made of them
report.py          reports as Markdown and JSON; figures.py their charts
command.py         what the command does
"""

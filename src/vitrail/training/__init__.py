"""Data, a model and a recipe → a bundle: one loop.

settings.py     everything that can be set; recipes.py reads and writes it as TOML
setup.py        what a run needs, made from an order: material, choices, learner, plan, state
loop.py         the loop: TrainState and Plan in, steps out
run.py          what happens around it: logging, evaluating, saving, stopping
feed.py         the micro-batches of any step
objectives.py   what is made small; masked.py without labels; losses.py
optimizers.py   which weights are changed how; muon.py, lion.py, adafactor.py; schedules.py
averaging.py    the running average of the weights
plan.py         where each step is on the schedule; budget.py, pace.py: ending on time
judge.py        evaluation during and after
state.py        the resumable state; state_folder.py keeps it whole or absent
survival.py     one writer, orderly stops, the cause of NaN
records.py      metrics.jsonl; report.py: report.html
ladder.py       from a probe to full fine-tuning, and which step paid: rungs.py, summit.py
vtab.py         the 1,000-example protocol over many sets: tasks.py, transfer.py, scores.py
"""

"""Data, a model and a recipe → a bundle: one loop.

settings.py     everything that can be set; recipes.py reads and writes it as TOML
setup.py        what a run needs, made from an order: material.py what it learns from, choices.py
                what was left open, learner.py the model, the plan, the state
loop.py         the loop: TrainState and Plan in, steps out
run.py          what happens around it: logging, evaluating, saving, stopping; api.py from Python,
                watch.py who wants to know
feed.py         the micro-batches of any step
objectives.py   what is made small; masked.py without labels; losses.py
optimizers.py   which weights are changed how; muon.py, lion.py, adafactor.py; schedules.py
averaging.py    the running average of the weights
device.py       the precision that pays; memory.py what fits, cores.py a part for each core,
                compiling.py a step that torch compiles
plan.py         where each step is on the schedule; budget.py, pace.py: ending on time
head_init.py    linear probing, then fine-tuning; finetune_plan.py how much fits into a budget
judge.py        evaluation during and after
state.py        the resumable state; state_folder.py keeps it whole or absent
survival.py     one writer, orderly stops, the cause of NaN
folder.py       a run's folder; records.py metrics.jsonl, report.py report.html, ending.py the end
ladder.py       from a probe to full fine-tuning, and which step paid: ground.py, rungs.py,
                summit.py
vtab.py         the 1,000-example protocol over many sets: tasks.py, transfer.py, scores.py
"""

"""Before a run: what it will take. `vitrail plan` prints it.

wish.py           what is to be planned
cost.py           operations of a picture, and of a whole training
trace.py          every block of memory of a step, found without computing
memory.py         what a device holds, by part; what fits
probe.py          a few real steps in a process of their own: time, and memory around the tensors
accelerators.py   published peaks, and the days they come to
planner.py        all of it: `plan(wish)`
page.py           how it would run on a cluster: docs/scale.md
"""

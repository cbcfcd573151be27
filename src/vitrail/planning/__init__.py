"""Before a run: what it will take, and what the machine can do. `vitrail plan` and `doctor` tell.

wish.py           what is to be planned
cost.py           operations of a picture, and of a whole training
trace.py          every block of memory of a step, found without computing
memory.py         what a device holds, by part; what fits
probe.py          a few real steps in a process of their own: time, and memory around the tensors
accelerators.py   published peaks, and the days they come to
planner.py        all of it: `plan(wish)`
page.py           how it would run on a cluster: docs/scale.md
packages.py       which packages and extras are there
machine.py        what this machine is: processor, memory, disks, variables
speed.py          what is fast on it, measured in a second or two
diagnosis.py      what is wrong, and what pays: sentences of the two
"""

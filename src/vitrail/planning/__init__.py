"""What a training run will cost, and what this machine can do: `vitrail plan` and `doctor`.

request.py   what is to be planned; a few real steps in a subprocess: time, and memory
flops.py     FLOPs of an image and of a whole run; published peaks of accelerators
plan.py      `make_plan(request)`: the whole plan, with every allocation of a training step
doctor.py    this machine: packages, hardware, disks, measured speed, problems
"""

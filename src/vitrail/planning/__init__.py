"""Before a run: what it will take. `vitrail plan` prints it.

cost.py        operations of a picture, and of a whole training
"""

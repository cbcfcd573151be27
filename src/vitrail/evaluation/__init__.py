"""A model and a data set → how good it is, and where it goes wrong.

outcome.py    what an evaluation finds, and the sums it is made of
evaluate.py   every picture of a source once, on any number of processes
"""

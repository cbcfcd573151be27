"""What frozen features know: probes in closed form, from few pictures and in seconds.

rows.py        features and labels as they come, checked and read a piece at a time
equations.py   the algebra of the closed-form probe; ridge.py the probe, and its path of l2
others.py      nearest neighbors and logistic regression on the same features
fewshot.py     the few-shot protocol as a plain function
features.py    a model's features of a data set, computed once and kept on disk
shots.py       how good each probe is for 1, 5, 10 ... pictures of each class
memory.py      the sums of what a probe has seen, kept in its bundle
teaching.py    classes added to a bundle, or put in the place of others
"""

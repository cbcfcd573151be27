"""Classifiers on frozen features, fitted in closed form from few images.

features.py   a model's features of a dataset, cached on disk
probes.py     what all probes share; nearest neighbors and logistic regression
ridge.py      the paper's closed-form probe, and its path of l2 with leave-one-out
fewshot.py    the few-shot protocol: accuracy with 1, 5, 10 ... images of each class
label_errors.py   possible label errors and outliers, and the review that fixes them
teach.py      classes added to a bundle without forgetting others
"""

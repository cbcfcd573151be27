"""A model and a dataset → an `EvaluationResult`.

evaluate.py      `vitrail.evaluate`, the quick evaluation during training, and inference itself
dataset.py       choice of split, overlap with the training data, class matching, ImageNet-ReaL
metrics.py       accuracy, F1, average precision, selective accuracy, and 95 % CIs (bootstrap)
calibration.py   reliability diagram, ECE, Brier score, temperature scaling
conformal.py     prediction sets and abstention with a guaranteed error rate
compare.py       two models on the same images: paired difference, McNemar, flips
robustness.py    accuracy, calibration and coverage under common corruptions
results.py       the result types, and their accumulation over batches and processes
"""

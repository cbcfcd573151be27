"""Inference: images to predictions, by torch or another engine.

predictor.py   `vitrail.Predictor`: load, preprocess, run, decode; image paths, patterns and stdin
engines.py     what computes logits: torch or onnxruntime, and the int8 accuracy guard
"""

"""A model and pictures → answers.

inputs.py      where pictures are found
engines.py     what computes logits
answers.py     logits in words
predictor.py   all of it: `vitrail.Predictor`
"""

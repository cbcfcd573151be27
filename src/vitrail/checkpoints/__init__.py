"""Weights ↔ files.

load.py           a model from any reference
rules.py          a foreign format is one table, read in both directions
npz.py            arrays out of an .npz file, safely
google.py         Google's files: which family, which layout, which names
google_vit.py     ViT and hybrid: the table, and the description read from shapes
google_bit.py     BiT
google_mixer.py   MLP-Mixer
"""

"""Weights ↔ files.

load.py, save.py     a model from any reference; a model into any format
convert.py           one format to another, compared before it says done
adapt.py             another number of classes, image size, channels, patch size
formats.py           the formats, and how a file tells which it is
rules.py             a format is one table, read in both directions
shapes.py            a description from names and shapes
files.py             tensors in files, safely; files whole or absent
bundle.py, card.py   our own format, and the model card in it
facts.py             preprocessing, class names, provenance
families.py          which preprocessing is meant, where a checkpoint does not state it
heads.py             the same model with another head
hub.py               hf:owner/name
google*.py, timm*.py, huggingface*.py, torchvision_vit.py, bit_pytorch.py   the tables
"""

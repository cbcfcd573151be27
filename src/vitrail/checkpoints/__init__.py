"""Checkpoints: load, save and convert weights.

load.py          load a model from a file, a folder or the hub; adapt it to another task
save.py          save a model in any format
convert.py       convert between formats and verify the result
bundle.py        vitrail's own format, with its model card
metadata.py      preprocessing, class names and provenance of a model
rules.py         the rule engine: a foreign format is one table, read in both directions
google.py        vision_transformer, big_vision, big_transfer (.npz); big_transfer in PyTorch
timm.py          timm, also DeiT, DINO, DINOv2 and MAE
huggingface.py   transformers
torchvision.py   torchvision
files.py         read untrusted tensor files safely, write files atomically
hub.py           the Hugging Face hub: hf:owner/name
"""

"""Checkpoints: load, save and convert weights.

load.py          load a model from a file, a folder or the hub; adapt it to another task
save.py          save a model in any format; convert a checkpoint and verify the result
bundle.py        vitrail's own format, with its model card
metadata.py      preprocessing, class names and provenance of a model
rules.py         the rule engine: a foreign format is one table, read in both directions
google.py        vision_transformer, big_vision and big_transfer (.npz)
bit.py           BiT of big_transfer (.npz and PyTorch) and big_vision
timm.py          timm, also DeiT, DINO, DINOv2 and MAE
huggingface.py   transformers' ViT, DeiT, DINOv2, MAE and MSN
clip.py          transformers' CLIP and SigLIP image towers
dinov3.py        DINOv3 of transformers, timm and Meta
torchvision.py   torchvision
files.py         read untrusted tensor files safely, write files atomically
builtin.py       models that come with the package: builtin:vit-photos
hub.py           the Hugging Face hub: hf:owner/name
"""

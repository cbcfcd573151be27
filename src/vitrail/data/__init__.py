"""Image files → batches.

    sources.py        open a data set, whatever it is: samples of bytes or pixels, and labels
    samples.py        what a sample and a source are
    folders.py, lists.py, shards.py, arrays.py, published.py, hf_datasets.py   the kinds
    given.py          what a person may give as a picture
    decoding.py       an encoded picture → the right pixels, or a reason why not
    preprocessing.py  how a picture becomes input: the value that travels with the weights
    transforms.py     pictures → bytes of a model's size, random or not
    variation.py      how training pictures are varied, as values
    augmentation.py   the random part, as pure functions; `mixing.py` that of whole batches
    order.py          which sample comes when
    loader.py         samples → batches, in worker processes
    health.py         what is wrong with a data set; `sheet.py` shows it, with `thumbnails.py`

Sources, decoding, preprocessing and health do not import torch.
"""

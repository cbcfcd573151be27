"""Image files → batches.

    sources.py        open a data set, whatever it is: samples of bytes or pixels, and labels
    samples.py        what a sample and a source are; splits.py what each is for
    origin.py         what a model has learned from, known again wherever it is
    folders.py, lists.py, shards.py, arrays.py, published.py, hf_datasets.py   the kinds
    files.py          bytes of files, read anywhere and written whole; tars.py where in a .tar,
                      array_files.py where in a .npz
    packing.py        a data set written as shards
    given.py          what a person may give as a picture; handful.py a few of one class
    decoding.py       an encoded picture → the right pixels, or a reason why not
    headers.py        what a file tells before it is decoded; av1.py what an AVIF costs
    preprocessing.py  how a picture becomes input: the value that travels with the weights
    transforms.py     pictures → bytes of a model's size, random or not
    variation.py      how training pictures are varied, as values
    augmentation.py   the random part, as pure functions; `mixing.py` that of whole batches,
                      policies.py RandAugment and its relatives, operations.py their parts
    order.py          which sample comes when
    loader.py         samples → batches, in threads (`threads.py`) or worker processes
    health.py         what is wrong with a data set; looks.py what each picture is known by,
                      duplicates.py which are the same, verdict.py all of it in words
    sheet.py          the same as a page, with `thumbnails.py`

Sources, decoding, preprocessing and health do not import torch.
"""

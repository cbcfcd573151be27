"""Image files → batches.

    datasets.py       open a dataset of any format, and its splits
    folders.py        class folders and lists; tar_shards.py WebDataset shards, and packing them
    arrays.py         .npz, .npy, MNIST and CIFAR; Hugging Face datasets; pickles.py safe pickles
    storage.py        local and remote files, atomic writes
    provenance.py     fingerprints, and what a bundle records about its training data
    image_headers.py  image headers, and limits against hostile files; decode.py pixels
    preprocessing.py  configuration of preprocessing (saved with the weights) and augmentation
    transforms.py     images → uint8 tensors of the model's input size
    corruptions.py    the 15 common corruptions of ImageNet-C
    augment.py        crops, RandAugment, TrivialAugment, AugMix, random erasing, mixup and CutMix
    loader.py         order of the samples; samples → batches, in threads or worker processes
    check.py          problems of a dataset

Datasets, decoding, preprocessing and checks do not import torch.
"""

"""Batches → tokens → encoder → features → logits.

    config.py          what a model is: frozen descriptions, free of torch; `checks.py` its checks
    names.py           the names the papers use, and the descriptions they stand for
    build.py           from a name or a description to a model
    stems.py           pictures → a grid of patch embeddings
    position.py        where a patch is; `grids.py` stretches a table to another grid
    encoder.py         tokens → tokens: self-attention and MLP blocks; `activation.py` GELU
    merging.py         patches that look alike go on as one, from block to block
    pooling.py         tokens → one vector
    vit.py             all of these together: the Vision Transformer
    resnet.py          convolutions of the hybrid's stem and of `bit.py`, the baseline
    mixer.py           MLP-Mixer
    initialization.py  every weight's first value; `whitening.py` filters that fit the pictures
    modes.py           learning or answering, left as it was
    kept.py            memory used again

Nothing is imported here, so that `vitrail.models.config` stays free of torch.
"""

"""Models: images → tokens → encoder → features → logits.

    config.py         frozen configurations of the three families, and their validation
    registry.py       named models and their configurations
    vit.py            the Vision Transformer; `create` and `build` models of every family
    patch_embed.py    images → patch embeddings
    pos_embed.py      position embeddings and their interpolation
    encoder.py        the Transformer encoder: blocks, MLPs, GELU and token merging
    attention.py      multi-head self-attention
    pooling.py        tokens → features
    resnet.py         the hybrid's ResNet stem, and BiT
    mixer.py          MLP-Mixer
    init.py           weight initialization
    lora.py           low-rank updates of frozen weights, and their merging

Nothing is imported here, so that `config.py` and `registry.py` stay free of torch.
"""

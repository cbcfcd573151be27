"""Engines of onnxruntime: normalized images in, logits and features out, as torch tensors.

An engine is opened from a file that `vitrail export` wrote, or made of a model. What is made of a
model is kept under the digest of everything it is made of, in ~/.cache/vitrail/onnx unless
VITRAIL_CACHE says otherwise; that folder may be deleted at any time. Where nothing can be written
there, nothing is kept.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail import __version__
from vitrail.checkpoints.bundle import digest
from vitrail.checkpoints.files import atomic_write
from vitrail.data.storage import cache_folder
from vitrail.errors import CheckpointError, DataError
from vitrail.export.description import about, from_texts
from vitrail.export.kinds import OnnxKind
from vitrail.extras import require
from vitrail.models.config import MixerConfig, VitConfig, pair
from vitrail.models.patch_embed import check_images
from vitrail.models.registry import name_of
from vitrail.models.vit import Model

File = str | PathLike[str] | bytes  # its path, or what is in it


class OnnxEngine:
    """A file of `vitrail export`, open and ready."""

    def __init__(self, file: File, *, name: str = "onnx", threads: int | None = None) -> None:
        self.name = name
        self.session = open_session(file, threads)
        texts = self.session.get_modelmeta().custom_metadata_map
        self.config, self.metadata, self.int8 = from_texts(texts, called(file))
        if self.session.get_inputs()[0].name != "images":
            raise CheckpointError(
                f"{called(file)} prepares pictures itself, and here they come prepared; export "
                "the model without --with-preprocessing"
            )
        self.channels = self.config.channels
        self.num_classes = self.config.num_classes

    def __call__(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W), already normalized → logits (B, K); features if it has no head."""
        return self.run(images, "logits" if self.num_classes else "features")[0]

    def features(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W), already normalized → one vector for each (B, D)."""
        return self.run(images, "features")[0]

    def run(self, images: Tensor, *outputs: str) -> list[Tensor]:
        """The named outputs. Nothing is copied on the way in or out."""
        self.check(images)
        array = images.detach().to("cpu", torch.float32).contiguous().numpy()
        return [torch.from_numpy(found) for found in self.session.run(outputs, {"images": array})]

    def check(self, images: Tensor) -> None:
        """Refuse a batch that the model cannot read."""
        config = self.config
        stride = config.stride if isinstance(config, VitConfig) else (1, 1)
        check_images(images, self.channels, stride)
        if isinstance(config, MixerConfig) and images.shape[-2:] != pair(config.image_size):
            raise DataError(
                f"images of {images.shape[-2]}x{images.shape[-1]} pixels do not fit this Mixer: "
                f"its token-mixing weights are tied to image_size={config.image_size}"
            )


def open_session(file: File, threads: int | None = None) -> Any:
    """onnxruntime's session of a file, on the processor.

    Its threads sleep while they have nothing to do: by default they would wait in a loop, which
    slows down whoever reads pictures meanwhile.
    """
    runtime = require("onnxruntime", extra="export", feature="ONNX")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads or torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3  # errors; they are raised as well
    given = file if isinstance(file, bytes) else os.fspath(file)
    if isinstance(given, str) and not Path(given).is_file():
        raise CheckpointError(f"there is no file {given}")
    try:
        return runtime.InferenceSession(given, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # a class of its own for each kind of trouble
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "it is empty"
        raise CheckpointError(
            f"{called(file)} cannot be opened as an ONNX model: {reason}"
        ) from None


def called(file: File) -> str:
    return "the model" if isinstance(file, bytes) else os.fspath(file)


def engine_for(
    model: Model,
    kind: OnnxKind,
    *,
    tell: Callable[[str], None] | None = None,
) -> OnnxEngine:
    """A model's engine, from the cache if it is there.

    A new "onnx" is compared with the model first. What "onnx-int8" loses is for the caller to
    measure (`guard.measure`).
    """
    require("onnxruntime", "onnx", extra="export", feature=f"engine={kind}")
    from vitrail.export.onnx_file import to_onnx
    from vitrail.export.proof import check_same, ready

    model = ready(model)
    int8 = kind == "onnx-int8"
    path = kept_at(model, about(model, int8=int8))
    if path is not None:
        with suppress(CheckpointError):
            return OnnxEngine(path, name=kind)
    if tell is not None:
        tell(f"{name_of(model.config)} is made ready for {kind}; it is kept for the next time")
    content = to_onnx(model, int8=int8)
    engine = OnnxEngine(content, name=kind)
    if not int8:
        check_same(model, engine.session)
    if path is not None:
        with suppress(CheckpointError), atomic_write(path) as temporary:
            temporary.write_bytes(content)
    return engine


def kept_at(model: Model, description: dict[str, Any]) -> Path | None:
    """Where a model's file is kept; None on a machine without a place for such things."""
    if (folder := cache_folder("onnx")) is None:
        return None
    versions = [__version__, require("onnxruntime", extra="export", feature="ONNX").__version__]
    key = digest(model.state_dict(), description | {"versions": versions})
    return folder / f"{key}.onnx"

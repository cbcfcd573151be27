"""onnxruntime as an engine: normalized images in, logits and features out, as torch tensors.

An engine is opened from a file of `vitrail export`, or made from a model. The latter are cached in
~/.cache/vitrail/onnx or VITRAIL_CACHE, under the digest of everything they depend on; the folder
may be deleted at any time. Where it cannot be written, nothing is cached.
"""

import json
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
from vitrail.checkpoints.metadata import Metadata
from vitrail.checkpoints.rules import replaced_module
from vitrail.data.storage import cache_folder
from vitrail.errors import CheckpointError, ConfigError, DataError
from vitrail.export import OnnxKind
from vitrail.export.torch_program import Outputs, describe_model
from vitrail.export.verify import prepare_model, verify_images
from vitrail.extras import require
from vitrail.models.config import MixerConfig, VitConfig, from_dict, pair
from vitrail.models.patch_embed import check_images
from vitrail.models.registry import name_of
from vitrail.models.vit import Model

INVALID_METADATA = (ValueError, LookupError, TypeError, AttributeError, RecursionError, ConfigError)
File = str | PathLike[str] | bytes  # a path, or the content


class OnnxEngine:
    """An onnxruntime session of a file of `vitrail export`."""

    def __init__(self, file: File, *, name: str = "onnx", threads: int | None = None) -> None:
        self.name = name
        self.session = open_session(file, threads)
        self.bytes = len(file) if isinstance(file, bytes) else Path(file).stat().st_size
        where = "the model" if isinstance(file, bytes) else os.fspath(file)
        texts = self.session.get_modelmeta().custom_metadata_map
        if "vitrail" not in texts:
            raise CheckpointError(
                f"{where} is an ONNX file without vitrail's metadata: preprocessing and class "
                "names are unknown; create the file with `vitrail export`"
            )
        try:
            values = {key: json.loads(text) for key, text in texts.items()}
            self.config = from_dict(values["model"])
            self.metadata = Metadata.from_dict(values)
            self.int8 = bool(values["int8"])
        except INVALID_METADATA as error:
            raise CheckpointError(f"{where} has invalid metadata: {error}") from None
        if self.session.get_inputs()[0].name != "images":
            raise CheckpointError(
                f"{where} includes preprocessing, and this engine takes preprocessed images; "
                "export the model without --with-preprocessing"
            )
        self.channels = self.config.channels
        self.num_classes = self.config.num_classes

    def __call__(self, images: Tensor) -> Tensor:
        """Return the logits (B, K) of normalized images, or the features without a head."""
        return self.run(images, "logits" if self.num_classes else "features")

    def features(self, images: Tensor) -> Tensor:
        """Return one vector per image (B, D)."""
        return self.run(images, "features")

    def run(self, images: Tensor, output: str) -> Tensor:
        config = self.config
        check_images(
            images, self.channels, config.stride if isinstance(config, VitConfig) else (1, 1)
        )
        if isinstance(config, MixerConfig) and images.shape[-2:] != pair(config.image_size):
            raise DataError(
                f"images of {images.shape[-2]}x{images.shape[-1]} pixels do not fit this Mixer: "
                f"its token-mixing weights are tied to image_size={config.image_size}"
            )
        images = images.detach().to("cpu", torch.float32).contiguous()
        return run_session(self.session, images, [output])[output]


def open_session(file: File, threads: int | None = None) -> Any:
    """Open a file in onnxruntime, on the CPU.

    Idle threads sleep: by default they would spin, which slows down the threads that decode images.
    """
    runtime = require("onnxruntime", extra="export", feature="ONNX")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads or torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3  # errors; they are raised as well
    content = file if isinstance(file, bytes) else os.fspath(file)
    if isinstance(content, str) and not Path(content).is_file():
        raise CheckpointError(f"file not found: {content}")
    if isinstance(content, str) and not os.access(content, os.R_OK):
        raise CheckpointError(f"permission denied: {content}")
    try:
        return runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has a class for each kind of error
        where = "the model" if isinstance(content, bytes) else content
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "it is empty"
        raise CheckpointError(f"{where} cannot be opened as an ONNX model: {reason}") from None


def run_session(session: Any, inputs: Tensor, outputs: list[str] | None = None) -> Outputs:
    """Run a session with one input, without copies; return all outputs or the named ones."""
    names = outputs or [output.name for output in session.get_outputs()]
    results = session.run(names, {session.get_inputs()[0].name: inputs.numpy()})
    return {name: torch.from_numpy(x) for name, x in zip(names, results, strict=True)}


def engine_for(
    model: Model, kind: OnnxKind, *, log: Callable[[str], None] | None = None
) -> OnnxEngine:
    """Export a model and open it, or open it from the cache.

    A new "onnx" is verified first. The accuracy of "onnx-int8" is for the caller to measure
    (`verify.measure_int8`).
    """
    runtime = require("onnxruntime", "onnx", extra="export", feature=f"engine={kind}")
    from vitrail.export.onnx import to_onnx

    model = prepare_model(model)
    int8 = kind == "onnx-int8"
    path = None
    if (folder := cache_folder("onnx")) is not None and not replaced_module(model):
        versions = {"versions": [__version__, runtime.__version__]}
        key = digest(model.state_dict(), describe_model(model, int8=int8) | versions)
        path = folder / f"{key}.onnx"
        with suppress(CheckpointError):
            return OnnxEngine(path, name=kind)
    if log is not None:
        log(f"exporting {name_of(model.config)} for engine={kind}; the file is cached")
    content = to_onnx(model, int8=int8)
    engine = OnnxEngine(content, name=kind)
    if not int8:
        verify_images(model, lambda images: run_session(engine.session, images))
    if path is not None:
        with suppress(CheckpointError), atomic_write(path) as temporary:
            temporary.write_bytes(content)
    return engine

"""torch.export: a model as a traced program, saved as it is or compiled by AOTInductor (.pt2).

Saved programs take any number of normalized images of the model's own size.
"""

import json
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import config as fx_config

from vitrail import __version__
from vitrail.checkpoints.metadata import get_metadata
from vitrail.evaluation.conformal import load_conformal
from vitrail.extras import check_compiler
from vitrail.models.config import pair, to_dict
from vitrail.models.registry import name_of
from vitrail.models.vit import Model, VisionTransformer

MAX_BATCH = 4096  # torch.export wants a bound
METADATA_FILE = "vitrail.json"  # inside a torch.export file
Outputs = dict[str, Tensor]  # logits (B, K), if the model has a head, and features (B, D)


class ModelOutputs(nn.Module):
    """Images to logits and features in one forward pass; optionally pixels, with preprocessing."""

    def __init__(self, model: Model, preprocess: nn.Module | None = None) -> None:
        super().__init__()
        self.model = model
        self.preprocess = preprocess

    def forward(self, images: Tensor) -> Outputs:
        model = self.model
        if self.preprocess is not None:
            images = self.preprocess(images)
        if isinstance(model, VisionTransformer):
            features, logits = model.run_head(*model.run_encoder(*model.prepare_tokens(images)))
        else:
            features = model.features(images)
            logits = None if model.head is None else model.head(features)
        return ({} if logits is None else {"logits": logits}) | {"features": features}


def describe_model(model: Model, *, int8: bool = False) -> dict[str, Any]:
    """Return the metadata of an exported file as plain values."""
    metadata = get_metadata(model)
    # `export_model` and `Predictor` warn.
    if not load_conformal(metadata, model.config.num_classes, model, int8=int8, warn=False):
        metadata = replace(metadata, conformal={})
    return {
        "vitrail": __version__,
        "name": name_of(model.config),
        "model": to_dict(model.config),
        **metadata.to_dict(),
        "multi_label": metadata.multi_label,
        "int8": int8,
    }


def trace(module: nn.Module, example: Tensor, dims: Mapping[int, Any]) -> ExportedProgram:
    """Trace a module; `dims` are the axes of its input that may have another size."""
    before = fx_config.do_not_emit_stack_traces
    fx_config.do_not_emit_stack_traces = True  # a tenth of the time, and paths in the file
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # torch's, about its own code
            shapes = (dict(dims),)
            return torch.export.export(module, (example,), dynamic_shapes=shapes, strict=False)
    finally:
        fx_config.do_not_emit_stack_traces = before


def save_program(model: Model, path: Path, *, compiled: bool) -> Any:
    """Write a torch.export program, or an AOTInductor package for this type of CPU.

    Returns it as loaded from the file.
    """
    if compiled:
        check_compiler("AOTInductor", "export --to torch")
    images = torch.zeros(2, model.config.channels, *pair(model.config.image_size))
    program = trace(ModelOutputs(model), images, {0: Dim("batch", min=1, max=MAX_BATCH)})
    metadata = json.dumps(describe_model(model))
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if compiled:
            from torch._inductor import aoti_compile_and_package, aoti_load_package

            package = aoti_compile_and_package(
                program,
                package_path=str(Path(folder) / "model.pt2"),
                inductor_configs={"aot_inductor.metadata": {"vitrail": metadata}},
            )
            path.write_bytes(Path(package).read_bytes())
            return aoti_load_package(package)
        with path.open("wb") as file:
            torch.export.save(program, file, extra_files={METADATA_FILE: metadata})
        with path.open("rb") as file:
            return torch.export.load(file).module()

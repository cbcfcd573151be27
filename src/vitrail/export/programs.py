"""A model as a program of torch.export, or compiled by AOTInductor: both are .pt2 files.

They take any number of normalized images of the model's own size, and give logits and features.
"""

import io
import json
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from vitrail.export.description import about
from vitrail.export.proof import TOLERANCE, Outputs, answers, largest_difference, within
from vitrail.extras import check_compiler
from vitrail.models.config import pair
from vitrail.models.vit import Model

MOST_IMAGES = 4096  # in one batch; torch wants a bound
ABOUT = "vitrail.json"  # the name, inside the file, of what travels with the weights


class Both(nn.Module):
    """Images (B, C, H, W) → {"logits": (B, K), "features": (B, D)}, in one pass."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Outputs:
        return answers(self.model, images)


def program(model: Model) -> ExportedProgram:
    """The model as torch.export sees it."""
    images = torch.zeros(2, model.config.channels, *pair(model.config.image_size))
    batch = {"images": {0: Dim("batch", min=1, max=MOST_IMAGES)}}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch's, about torch's own code
        return torch.export.export(Both(model), (images,), dynamic_shapes=batch)


def write_program(model: Model, path: Path) -> float:
    """Write a torch.export program; how far it is from the model."""
    made = program(model)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(made, buffer, extra_files={ABOUT: json.dumps(about(model))})
        buffer.seek(0)
        again = torch.export.load(buffer).module()
    difference = within(TOLERANCE, largest_difference(model, again, sizes=False))
    path.write_bytes(buffer.getbuffer())
    return difference


def write_compiled(model: Model, path: Path) -> float:
    """Write an AOTInductor package for this kind of machine; how far it is from the model."""
    check_compiler("AOTInductor", "export --to torch")
    from torch._inductor import aoti_compile_and_package, aoti_load_package

    made = program(model)
    texts = {"vitrail": json.dumps(about(model))}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = aoti_compile_and_package(
            made,
            package_path=str(Path(folder) / "model.pt2"),
            inductor_configs={"aot_inductor.metadata": texts},
        )
        again: Any = aoti_load_package(package)
        difference = largest_difference(model, again, sizes=False)
        shutil.copyfile(package, path)
    return within(TOLERANCE, difference)

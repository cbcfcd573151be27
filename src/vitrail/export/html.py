"""One HTML file that classifies images in a browser, without a server and without a network.

The page is that of `vitrail serve`; browser/client.js answers its requests from the model in a
worker thread. The file holds the weights (gzip, base64), the kernel program, 10 KB of WebAssembly,
class names, preprocessing and, for models of `fewshot` and `teach`, the memory of their classes.
Its Content-Security-Policy forbids every request.
"""

import base64
import gzip
import hashlib
import json
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor

from vitrail.checkpoints.metadata import get_metadata
from vitrail.data.datasets import open_dataset
from vitrail.data.decode import thumbnail, to_jpeg
from vitrail.errors import ConfigError
from vitrail.evaluation.evaluate import Progress
from vitrail.export.kernel_program import KernelProgram, compile_model
from vitrail.export.session import open_session, run_session
from vitrail.export.torch_program import Outputs, describe_model
from vitrail.export.verify import INT8_TOLERANCE, Data, Int8Accuracy, check_difference, measure_int8
from vitrail.models.config import VitConfig
from vitrail.models.vit import Model
from vitrail.probing.teach import MEMORY_FILE, features_digest, load_memory

HALF_TOLERANCE = 5e-2  # of the largest output, for weights in float16; usually below 2e-3
MAX_EXAMPLES = 8
EXAMPLE_SIDE = 320  # pixels
STYLES = ("serving/assets/base.css", "serving/assets/page.css", "export/browser/tools.css")
SHARED = ("images", "overlay", "state", "uploads", "results", "explanations", "page")
SCRIPTS = (
    "export/browser/client.js",
    *(f"serving/assets/{name}.js" for name in SHARED),
    "export/browser/tools.js",
)
WORKER = (
    "serving/assets/images.js",
    *(f"export/browser/{name}.js" for name in ("engine", "preprocess", "attention", "ridge")),
    "export/browser/worker.js",
)
# Texts about the server, which an exported page replaces.
REPLACED = {
    "Images are sent to this server only and are not stored.": "Images stay on this device: this "
    "page works without a network and sends nothing.",
    '<a href="docs">API documentation</a>': "<span>made with vitrail</span>",
    " The API does not: <code>POST /predict</code>.": "",
}


def build_page(
    model: Model,
    *,
    title: str,
    int8: bool = False,
    data: Data | None = None,
    max_drop: float = 1.0,
    folder: Path | None = None,
    examples: str | None = None,
    progress: Progress | None = None,
) -> tuple[str, float, Int8Accuracy | None]:
    """Return the page, the largest relative difference of its outputs, and the accuracy of int8.

    `folder` is the model's bundle, which may have a memory of taught classes.
    """
    taught = b""
    if folder is not None and load_memory(folder, model) is not None:
        taught = (folder / MEMORY_FILE).read_bytes()
    program = compile_model(model, int8=int8)
    session = open_session(program.onnx)

    def run(images: Tensor) -> Outputs:
        results = [run_session(session, image[None].contiguous()) for image in images]
        return {key: torch.cat([result[key] for result in results]) for key in results[0]}

    size, channels = get_metadata(model).preprocessing.size, model.config.channels
    rng = torch.Generator().manual_seed(0)
    batches = (torch.randn(n, channels, *size, generator=rng) for n in (1, 2))
    tolerance = INT8_TOLERANCE if int8 else HALF_TOLERANCE
    difference = check_difference(model, run, ((x, x) for x in batches), tolerance)
    cost = None
    if int8:
        output = "logits" if model.config.num_classes else "features"
        cost = measure_int8(model, lambda images: run(images)[output], data, progress=progress)
        cost.check(max_drop)
    # The page tests its arithmetic with this input, which browser/worker.js makes too.
    shape = program.tensors["images"][1:]
    values = (np.arange(np.prod(shape)) * 7919 % 2003) / 1001.5 - 1
    outputs = run(torch.from_numpy(values.astype(np.float32).reshape(shape)))
    about = describe_page(model, program, title, int8=int8) | {
        "examples": read_examples(examples) if examples else [],
        "check": torch.cat([x.flatten() for x in outputs.values()]).tolist(),
    }
    return render(about, program.weights, taught, title), difference, cost


def describe_page(
    model: Model, program: KernelProgram, name: str, *, int8: bool = False
) -> dict[str, Any]:
    """Return what the page knows about the model, with the keys of the server's /model."""
    metadata, config = get_metadata(model), model.config
    described = describe_model(model, int8=int8)
    view = None
    if isinstance(config, VitConfig) and f"layer {config.depth - 1}" in program.tensors:
        lag = (1 - 1 / config.stride[0]) / 2 if config.stem == "conv" else 0.0
        size = metadata.preprocessing.size
        view = {
            "grid": [size[0] // config.stride[0], size[1] // config.stride[1]],
            "prefix": config.num_prefix,
            "heads": config.heads,
            "depth": config.depth,
            "pool": config.pool,
            "classTokens": config.num_class_tokens,
            "lag": lag,  # `token_offset` of inspection/attention.py
        }
    return {
        "name": name,
        "architecture": described["name"],
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "classes": list(metadata.names(config.num_classes)),
        "multi_label": metadata.multi_label,
        "conformal": described.get("conformal"),
        "image_size": list(metadata.preprocessing.size),
        "channels": config.channels,
        "preprocessing": metadata.preprocessing.to_dict(),
        "methods": ["rollout"] if view else [],
        "view": view,
        "teach": not metadata.multi_label,
        "backbone": features_digest(model),
        "limits": {"bytes": 2**40},
        "program": {
            "calls": program.calls,
            "constants": program.constants,
            "tensors": program.tensors,
            "memory": program.memory,
        },
    }


def read_examples(reference: str) -> list[dict[str, str]]:
    """Return one image of each of some classes of a dataset, small enough to be embedded."""
    source = open_dataset(reference, "all")
    if source.multi_label:
        raise ConfigError(f"{reference} has several labels per image; leave out --examples")
    labels = np.asarray(source.labels())
    _, rows = np.unique(labels, return_index=True)
    rows = rows[np.linspace(0, len(rows) - 1, min(len(rows), MAX_EXAMPLES)).astype(int)]
    images = [(thumbnail(source, int(row), EXAMPLE_SIDE, enlarge=False), row) for row in rows]
    return [
        {"label": source.classes[labels[row]], "data": to_base64(to_jpeg(image.convert("RGB")))}
        for image, row in images
        if image is not None
    ]


def render(about: dict[str, Any], weights: bytes, taught: bytes, title: str) -> str:
    package = resources.files("vitrail")

    def join(*names: str) -> str:
        return "\n".join((package / name).read_text(encoding="utf-8") for name in names)

    style, script = join(*STYLES), join(*SCRIPTS)
    kernels = (package / "export/browser/kernels.wasm").read_bytes()
    model = json.dumps(about, separators=(",", ":")).replace("<", "\\u003c")
    data = {  # id: type, content
        "model": ("application/json", model),
        "taught": ("text/plain", to_base64(taught)),
        "worker": ("text/plain", join(*WORKER)),
        "kernels": ("text/plain", to_base64(kernels)),
        "weights": ("text/plain", to_base64(gzip.compress(weights, 6, mtime=0))),
    }
    style_hash, script_hash = (
        f"'sha256-{to_base64(hashlib.sha256(text.encode()).digest())}'" for text in (style, script)
    )
    policy = (
        "default-src 'none'; img-src blob: data:; worker-src blob:; manifest-src data:; "
        f"style-src {style_hash}; script-src {script_hash} 'wasm-unsafe-eval' blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    page = join("serving/assets/page.html")
    for old, new in REPLACED.items():
        assert old in page, old
        page = page.replace(old, new)
    page = page.replace("<title>vitrail</title>", "<title>$title</title>")
    page = page.replace(
        '<meta charset="utf-8">',
        f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
    )
    icon = f"data:image/svg+xml,{quote(join('serving/assets/icon.svg'))}"
    page = Template(
        page.replace('<script type="module">', '$data<script type="module">')
    ).substitute(
        title=escape(title),
        style=style,
        script=script,
        icon=icon,
        data="".join(
            f'<script type="{kind}" id="{id}">{content}</script>\n'
            for id, (kind, content) in data.items()
        ),
    )
    assert page.count("</script") == len(data) + 1, "it would end a script element"
    return page


def to_base64(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")

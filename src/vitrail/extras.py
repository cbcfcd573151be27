"""What not everybody has: the libraries of an extra, and a C++ compiler."""

import os
import shutil
from importlib import import_module
from typing import Any

from vitrail.errors import ConfigError

# What the optional parts of the package are for; `pyproject.toml` says what is in them.
EXTRAS = {
    "fast": "JPEGs are decoded faster",
    "data": "data sets of the Hugging Face hub, and files on other machines",
    "track": "curves in TensorBoard",
    "inspect": "`vitrail inspect` draws a data set as a map",
    "figures": "charts of `vitrail reproduce`",
    "export": "ONNX files, and the engines onnx and onnx-int8",
    "serve": "`vitrail serve`",
}


def need(*modules: str, extra: str, what: str) -> Any:
    """The first of these modules; one that is missing is told, and how to get it."""
    assert extra in EXTRAS
    for module in modules:
        try:
            import_module(module)
        except ImportError:
            name = module.partition(".")[0].replace("_", "-")
            raise ConfigError(
                f"{what} needs {name}; install it with: pip install 'vitrail[{extra}]'"
            ) from None
    return import_module(modules[0])


def check_compiler(what: str, instead: str) -> None:
    """Refuse early and clearly where nothing can compile the C++ that torch writes."""
    named = os.environ.get("CXX")
    if not any(shutil.which(name) for name in ([named] if named else ["g++", "clang++", "cl"])):
        found = f"CXX={named} is not there" if named else "none was found"
        raise ConfigError(f"{what} needs a C++ compiler, and {found}; install g++, or {instead}")

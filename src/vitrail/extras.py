"""Optional requirements: the libraries of an extra, and a C++ compiler."""

import os
import shutil
from importlib import import_module
from typing import Any

from vitrail.errors import ConfigError

# What each extra enables; `pyproject.toml` lists the packages.
EXTRAS = {
    "fast": "faster JPEG decoding",
    "data": "datasets of the Hugging Face hub, remote files",
    "track": "TensorBoard logging",
    "inspect": "t-SNE maps in `vitrail inspect`",
    "export": "ONNX export, the engines onnx and onnx-int8",
    "serve": "`vitrail serve`",
}
# Disables the telemetry of the official onnxruntime builds; read when onnxruntime is imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def require(*modules: str, extra: str, feature: str) -> Any:
    """Import the modules of an extra and return the first; a missing one is a `ConfigError`."""
    assert extra in EXTRAS
    for module in modules:
        try:
            import_module(module)
        except ImportError:
            name = module.partition(".")[0].replace("_", "-")
            raise ConfigError(install_hint(name, extra=extra, feature=feature)) from None
    return import_module(modules[0])


def install_hint(package: str, *, extra: str, feature: str) -> str:
    return f"{feature} needs {package}; install it with: pip install 'vitrail[{extra}]'"


def check_compiler(feature: str, alternative: str) -> None:
    """Raise if there is no C++ compiler, which torch.compile needs."""
    compiler = os.environ.get("CXX")
    if not any(
        shutil.which(name) for name in ([compiler] if compiler else ["g++", "clang++", "cl"])
    ):
        reason = f"CXX={compiler} does not exist" if compiler else "none was found"
        raise ConfigError(
            f"{feature} needs a C++ compiler, but {reason}; install g++, or {alternative}"
        )

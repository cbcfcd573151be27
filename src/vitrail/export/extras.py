"""Libraries that not everybody has."""

from importlib import import_module
from typing import Any

from vitrail.errors import ConfigError


def need(*modules: str, what: str = "ONNX") -> Any:
    """The first of these modules; one that is missing is told, and how to get it."""
    for module in modules:
        try:
            import_module(module)
        except ImportError:
            raise ConfigError(
                f"{what} needs {module}; install it with: pip install 'vitrail[export]'"
            ) from None
    return import_module(modules[0])

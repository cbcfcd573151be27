"""Vision Transformers from training to serving: public names, which import torch on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitrail.checkpoints.load import load as load
    from vitrail.checkpoints.metadata import Metadata as Metadata
    from vitrail.checkpoints.save import push as push
    from vitrail.checkpoints.save import save as save
    from vitrail.data.datasets import open_dataset as open_dataset
    from vitrail.data.preprocessing import Preprocessing as Preprocessing
    from vitrail.data.storage import allow_outside as allow_outside
    from vitrail.errors import CheckpointError as CheckpointError
    from vitrail.errors import ConfigError as ConfigError
    from vitrail.errors import DataError as DataError
    from vitrail.errors import TrainingError as TrainingError
    from vitrail.errors import VitrailError as VitrailError
    from vitrail.evaluation.conformal import calibrate as calibrate
    from vitrail.evaluation.evaluate import evaluate as evaluate
    from vitrail.export.api import export_model as export_model
    from vitrail.inspection.inspect import inspect_model as inspect_model
    from vitrail.models.attention import SelfAttention as SelfAttention
    from vitrail.models.attention import register_attention as register_attention
    from vitrail.models.config import NUMERICS as NUMERICS
    from vitrail.models.config import BitConfig as BitConfig
    from vitrail.models.config import MixerConfig as MixerConfig
    from vitrail.models.config import Numerics as Numerics
    from vitrail.models.config import VitConfig as VitConfig
    from vitrail.models.mixer import MlpMixer as MlpMixer
    from vitrail.models.resnet import BiT as BiT
    from vitrail.models.vit import VisionTransformer as VisionTransformer
    from vitrail.models.vit import create as create
    from vitrail.prediction.engines import AccuracyGuard as AccuracyGuard
    from vitrail.prediction.predictor import Prediction as Prediction
    from vitrail.prediction.predictor import Predictor as Predictor
    from vitrail.probing.fewshot import fewshot as fewshot
    from vitrail.probing.teach import teach as teach
    from vitrail.training.callbacks import Callback as Callback
    from vitrail.training.config import Settings as Settings
    from vitrail.training.trainer import train as train

__version__ = "0.2.0"

PUBLIC = {
    "checkpoints.load": ["load"],
    "checkpoints.metadata": ["Metadata"],
    "checkpoints.save": ["push", "save"],
    "data.datasets": ["open_dataset"],
    "data.preprocessing": ["Preprocessing"],
    "data.storage": ["allow_outside"],
    "errors": ["VitrailError", "CheckpointError", "ConfigError", "DataError", "TrainingError"],
    "evaluation.conformal": ["calibrate"],
    "evaluation.evaluate": ["evaluate"],
    "export.api": ["export_model"],
    "inspection.inspect": ["inspect_model"],
    "models.attention": ["SelfAttention", "register_attention"],
    "models.config": ["NUMERICS", "BitConfig", "MixerConfig", "Numerics", "VitConfig"],
    "models.mixer": ["MlpMixer"],
    "models.resnet": ["BiT"],
    "models.vit": ["VisionTransformer", "create"],
    "prediction.engines": ["AccuracyGuard"],
    "prediction.predictor": ["Prediction", "Predictor"],
    "probing.fewshot": ["fewshot"],
    "probing.teach": ["teach"],
    "training.callbacks": ["Callback"],
    "training.config": ["Settings"],
    "training.trainer": ["train"],
}
MODULE_OF = {name: module for module, names in PUBLIC.items() for name in names}
RENAMED = {  # names of 0.1
    "Answer": ("Prediction", "prediction.predictor", "Prediction"),
    "Facts": ("Metadata", "checkpoints.metadata", "Metadata"),
    "Guard": ("AccuracyGuard", "prediction.engines", "AccuracyGuard"),
    "Watch": ("Callback", "training.callbacks", "Watch"),
    "open_source": ("open_dataset", "data.datasets", "open_dataset"),
}
__all__ = [*MODULE_OF]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in RENAMED:
        from vitrail.errors import warn_renamed

        new, module, attribute = RENAMED[name]
        warn_renamed(f"vitrail.{name}", f"vitrail.{new}")
        return getattr(import_module(f"vitrail.{module}"), attribute)
    if name not in MODULE_OF:
        raise AttributeError(f"module 'vitrail' has no attribute {name!r}")
    return getattr(import_module(f"vitrail.{MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *MODULE_OF])

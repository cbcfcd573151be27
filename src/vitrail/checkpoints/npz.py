"""Arrays out of an .npz file: no code is run, and a broken file is one clear line."""

import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import CheckpointError


def read_npz(path: Path) -> dict[str, Tensor]:
    """Every array of the file, by name."""
    arrays = {}
    try:
        with path.open("rb") as stream:
            file = np.load(stream, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise CheckpointError(f"{path} holds one array, not a model's many")
            for name in file.files:
                arrays[name] = to_tensor(name, file[name])
    except FileNotFoundError:
        raise CheckpointError(f"there is no file {path}") from None
    except IsADirectoryError:
        raise CheckpointError(f"{path} is a folder, not an .npz file") from None
    except PermissionError:
        raise CheckpointError(f"{path} may not be read by this user") from None
    except (
        OSError,
        ValueError,
        EOFError,
        KeyError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path} is not a whole .npz file: {reason}") from None
    return arrays


def to_tensor(name: str, array: np.ndarray) -> Tensor:
    """A tensor of the array's values; JAX stores bfloat16 as two bytes without a meaning."""
    if array.dtype.kind == "V" and array.dtype.itemsize == 2:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    if array.dtype.kind not in "fiu":
        raise CheckpointError(f"{name} holds {array.dtype} values, which are no weights")
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))

"""A few pictures of one class: a file, or a folder with the pictures in it."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vitrail.data.folders import FolderStore, notes_about, pictures
from vitrail.data.samples import Collection, Samples, Texts, is_picture
from vitrail.errors import DataError

Place = str | os.PathLike[str]


def open_handful(places: Place | Sequence[Place], name: str) -> Samples:
    """The pictures of files and folders, all of them of the class `name`."""
    places = [places] if isinstance(places, str | os.PathLike) else places
    names, left_out = Texts(), Counter[str]()
    for place in map(Path, places):
        path = place.expanduser()
        if path.is_dir():
            for picture in pictures(path, "", left_out):
                names.append(os.path.join(path, picture))
        elif path.is_file() and is_picture(path.name):
            names.append(os.fspath(path))
        else:
            what = "is no picture" if path.exists() else "does not exist"
            raise DataError(f"{name}={place}: it {what}; give a picture, or a folder of pictures")
    if not len(names):
        raise DataError(f"{name}={', '.join(map(str, places))}: there is no picture in it")
    return Samples(
        Collection(
            names=names,
            labels=np.zeros(len(names), np.int32),
            classes=(name,),
            store=FolderStore("", names),
            notes=tuple(notes_about(left_out)),
        )
    )

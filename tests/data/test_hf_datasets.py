import pickle
import sys

import pytest
from tiny_sets import png

from vitrail.data.datasets import open_dataset, split_counts
from vitrail.data.provenance import fingerprint
from vitrail.data.storage import allow_outside
from vitrail.data.tar_shards import pack
from vitrail.errors import ConfigError, DataError

pytestmark = pytest.mark.slow


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    library = pytest.importorskip("datasets", reason="pip install 'vitrail[data]' to run these")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(library.config, "HF_DATASETS_OFFLINE", True)
    library.disable_progress_bars()
    return library


def make(datasets, length, start=0):
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["ape", "bee"])}
    rows = range(start, start + length)
    values = {
        "image": [{"bytes": png(i), "path": None} for i in rows],
        "label": [i % 2 for i in rows],
    }
    return datasets.Dataset.from_dict(values, features=datasets.Features(kinds))


@pytest.fixture
def parquet(datasets, tmp_path):
    (tmp_path / "set" / "data").mkdir(parents=True)
    for name, table in (("train", make(datasets, 6)), ("validation", make(datasets, 3, 6))):
        table.to_parquet(tmp_path / "set" / "data" / f"{name}-00000-of-00001.parquet")
    return tmp_path / "set"


def test_missing_library_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "train.parquet").write_bytes(b"")
    for reference in ("hf:cifar10", tmp_path, tmp_path / "train.parquet"):
        with pytest.raises(ConfigError, match=r"pip install 'vitrail\[data\]'"):
            open_dataset(reference)


def test_folder_of_parquet_files(parquet, tmp_path):
    assert split_counts(parquet) == {"train": 6, "val": 3}
    source = open_dataset(parquet, "validation")
    assert source.classes == ("ape", "bee")
    assert source.labels().tolist() == [0, 1, 0]
    assert [sample.data for sample in source] == [png(6), png(7), png(8)]
    assert source.name(2) == "val/2"
    again = pickle.loads(pickle.dumps(source))
    assert again[1] == source[1]
    assert fingerprint(again) == fingerprint(source)
    list(pack(str(parquet), tmp_path / "shards"))
    assert [sample.data for sample in open_dataset(tmp_path / "shards", "val")] == [
        sample.data for sample in source
    ]


def test_single_parquet_file(parquet):
    path = next((parquet / "data").glob("train*"))
    assert len(open_dataset(path, "all")) == 6


def test_save_to_disk_format(datasets, tmp_path):
    both = datasets.DatasetDict(train=make(datasets, 6), test=make(datasets, 2))
    both.save_to_disk(tmp_path / "both")
    make(datasets, 10).save_to_disk(tmp_path / "one")
    assert split_counts(tmp_path / "both") == {"train": 6, "test": 2}
    assert len(open_dataset(tmp_path / "one", "all")) == 10
    assert [sample.label for sample in open_dataset(tmp_path / "both", "test")] == [0, 1]


def test_multi_label_and_string_labels(datasets, tmp_path):
    image = [{"bytes": png(i), "path": None} for i in range(3)]
    several = datasets.Features(
        {"img": datasets.Image(), "labels": datasets.List(datasets.ClassLabel(names=list("abc")))}
    )
    table = datasets.Dataset.from_dict({"img": image, "labels": [[0, 2], [], [1]]}, several)
    table.save_to_disk(tmp_path / "several")
    assert list(open_dataset(tmp_path / "several", "all").labels()) == [(0, 2), (), (1,)]
    named = datasets.Features({"img": datasets.Image(), "label": datasets.Value("string")})
    table = datasets.Dataset.from_dict({"img": image, "label": ["b", "a", "b"]}, named)
    table.save_to_disk(tmp_path / "named")
    assert open_dataset(tmp_path / "named", "all").labels().tolist() == [1, 0, 1]


def test_unlabeled_split_is_skipped(datasets, tmp_path):
    hidden = make(datasets, 2).remove_columns("label").add_column("label", [-1, -1])
    hidden = hidden.cast_column("label", datasets.ClassLabel(names=["ape", "bee"]))
    datasets.DatasetDict(train=make(datasets, 6), test=hidden).save_to_disk(tmp_path / "set")
    source = open_dataset(tmp_path / "set")
    assert source.notes == ("split test has no labels and was skipped",)
    assert split_counts(tmp_path / "set") == {"train": 6}


def test_library_errors_are_one_line(datasets, tmp_path):
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 not really")
    table = datasets.Dataset.from_dict({"text": ["a"], "label": [1]})
    table.save_to_disk(tmp_path / "text")
    for reference, words in (
        (tmp_path / "broken.parquet", "cannot open"),
        ("hf:nobody/nothing", "cannot open hf:nobody/nothing"),
        (tmp_path / "text", "has no image column; its columns: text, label"),
    ):
        with pytest.raises(DataError, match=words) as error:
            open_dataset(reference)
        assert "\n" not in str(error.value)


def test_table_may_not_name_files_outside_its_folder(datasets, tmp_path):
    (tmp_path / "id_rsa").write_bytes(b"secret")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "inside.png").write_bytes(png(1))
    files = [tmp_path / "set" / "inside.png", tmp_path / "id_rsa"]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    rows = {"image": [{"bytes": None, "path": str(file)} for file in files], "label": ["a", "b"]}
    table = datasets.Dataset.from_dict(rows, features=features)
    pyarrow = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "set" / "train.parquet"
    pyarrow.write_table(table.data.table, path)  # `to_parquet` would put the bytes in
    source = open_dataset(path, "all")
    assert source[0].data == png(1)
    with pytest.raises(DataError, match=r"which is outside .*--allow-outside"):
        source[1]
    with allow_outside():
        assert open_dataset(path, "all")[1].data == b"secret"

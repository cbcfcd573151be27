import gzip
import os
import pickle
import struct
import sys
import zipfile

import numpy as np
import pytest
from tiny_sets import pixels, png, same_samples

from fuzzing import count_rejected
from vitrail.data import arrays
from vitrail.data.datasets import SampleEncoder, open_dataset, split_counts
from vitrail.data.provenance import fingerprint
from vitrail.data.storage import allow_outside
from vitrail.data.tar_shards import pack
from vitrail.errors import ConfigError, DataError

pytestmark = pytest.mark.slow


def idx(array: np.ndarray) -> bytes:
    """As MNIST's authors wrote it."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def python2_pickle(data: np.ndarray, labels: list[int], key: bytes = b"labels") -> bytes:
    """The opcodes of the published files, which Python 2 wrote with its second protocol."""
    numbers = b"".join(b"K" + bytes([label]) for label in labels)
    return (
        b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x15training batch 1 of 5q\x03"
        b"U" + bytes([len(key)]) + key + b"q\x04]q\x05(" + numbers + b"e"
        b"U\x04dataq\x06cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08"
        b"K\x00\x85U\x01b\x87Rq\x09(K\x01" + b"M" + struct.pack("<H", len(data)) + b"M\x00\x0c\x86"
        b"cnumpy\ndtype\nq\x0aU\x02u1K\x00K\x01\x87Rq\x0b(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xff"
        b"K\x00tb\x89T" + struct.pack("<i", data.nbytes) + data.tobytes() + b"tbu."
    )


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_with_splits_and_class_names(tmp_path, save):
    images, labels = np.asfortranarray(pixels(8, (4, 5, 3))), np.arange(8) % 2
    save(tmp_path / "a.npz", x_train=images[:6], y_train=labels[:6, None], x_test=images[6:],
         y_test=labels[6:].astype(float), class_names=np.array(["cat", "dog"]))  # fmt: skip
    assert split_counts(tmp_path / "a.npz") == {"train": 6, "test": 2}
    source = open_dataset(tmp_path / "a.npz", "test")
    assert source.classes == ("cat", "dog")
    assert source.name(1) == "test/1"
    assert np.array_equal(source[1].data, images[7])
    assert source.labels().tolist() == [0, 1]
    source[1].data[:] = 0  # a copy: the set is not changed
    assert source[1].data.any()
    assert source.in_memory
    is_mapped = isinstance(source.index.store.parts[1].values, np.memmap)
    assert is_mapped == (save is np.savez)
    assert len(pickle.dumps(source)) < 2000


def test_array_names_and_label_notations(tmp_path):
    images, labels = pixels(10), np.arange(10) % 5
    np.savez(tmp_path / "med.npz", train_images=images, train_labels=labels[:, None],
             val_images=images[:4], val_labels=labels[:4])  # fmt: skip
    assert split_counts(tmp_path / "med.npz") == {"train": 10, "val": 4}
    np.savez(tmp_path / "plain.npz", images=images, labels=labels)
    (tmp_path / "pair").mkdir()
    np.save(tmp_path / "pair" / "images.npy", images)
    np.save(tmp_path / "pair" / "labels.npy", labels)
    for reference in ("plain.npz", "pair", "pair/images.npy", "pair/labels.npy"):
        assert np.array_equal(open_dataset(tmp_path / reference, "all")[3].data, images[3])
    for labels, expected, classes in (
        (np.array([[1, 0, 1], [0, 0, 0], [0, 1, 0]]), [(0, 2), (), (1,)], "012"),
        (np.eye(3, dtype=np.uint8), [0, 1, 2], "012"),
        (np.eye(3, 5), [0, 1, 2], "01234"),  # classes without images
        (np.array(["b", "a", "b"]), [1, 0, 1], "ab"),
    ):
        np.savez(tmp_path / "a.npz", images=pixels(3), labels=labels)
        source = open_dataset(tmp_path / "a.npz", "all")
        assert list(source.labels()) == expected
        assert source.classes == tuple(classes)


def test_one_label_each_in_one_split_only(tmp_path):
    both = {"x_train": pixels(2), "x_test": pixels(2), "y_train": np.ones((2, 2), int)}
    np.savez(tmp_path / "a.npz", **both, y_test=np.eye(2, dtype=int))
    assert list(open_dataset(tmp_path / "a.npz", "test").labels()) == [(0,), (1,)]
    np.savez(tmp_path / "b.npz", **both, y_test=np.eye(2, 3, dtype=int))
    with pytest.raises(DataError, match=r"shapes \(2, 2\) and \(2, 3\)"):
        open_dataset(tmp_path / "b.npz", "test")


@pytest.mark.parametrize("channels", [2, 3, 6, 13])
def test_any_number_of_channels_first_or_last(tmp_path, channels):
    images = pixels(3, (16, 20, channels))
    first = images.transpose(0, 3, 1, 2) if channels > 2 else images
    for name, array in (("last", images), ("first", first)):
        np.savez(tmp_path / f"{name}.npz", images=array, labels=np.arange(3))
        source = open_dataset(tmp_path / f"{name}.npz", "all")
        for dataset in (source, pickle.loads(pickle.dumps(source))):
            assert np.array_equal(dataset[2].data, images[2])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": pixels(3)}, "images but no labels"),
        ({"x_train": pixels(3), "y_test": np.arange(3)}, "no labels for train"),
        ({"labels": np.arange(3)}, "expected arrays x_train and y_train, or images and labels"),
        ({"images": pixels(3), "labels": np.arange(2)}, "3 images but 2 labels"),
        ({"images": pixels(3).astype(np.float32), "labels": np.arange(3)}, "images of float32"),
        ({"images": pixels(3, ()), "labels": np.arange(3)}, r"images of shape \(3,\)"),
        ({"images": pixels(3, (2, 2, 9)), "labels": np.arange(3)}, "either 2 or 9 channels"),
        ({"images": pixels(3, (6, 6, 6)), "labels": np.arange(3)}, "either 6 or 6 channels"),
        ({"images": pixels(0), "labels": np.arange(0)}, "contains no images"),
        ({"images": pixels(3), "labels": np.array([0, -1, 2])}, "outside its 3 classes"),
        ({"images": pixels(3), "labels": np.array([0, 1, 10**12])}, "outside its 1000000 classes"),
        ({"images": pixels(3), "labels": np.array([0.5, 1, 2])}, "labels of shape"),
        ({"images": pixels(2), "labels": np.array([0, 1], object)}, "could run code"),
        ({"images": pixels(2), "labels": np.array([0, 2]), "classes": ["a", "b"]}, "outside its 2"),
    ],
)
def test_invalid_arrays_are_rejected(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=message) as error:
        open_dataset(tmp_path / "a.npz")
    assert "\n" not in str(error.value)


def test_corrupt_arrays_and_pickles_never_crash(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", images=pixels(5), labels=np.arange(5))
    np.save(tmp_path / "labels.npy", np.arange(5))
    np.save(tmp_path / "images.npy", pixels(5))
    for name in ("a.npz", "images.npy"):
        assert count_rejected(tmp_path / name, 300) > 100
    path = tmp_path / "cifar" / "data_batch_1"
    path.parent.mkdir()
    path.write_bytes(python2_pickle(pixels(2, (3072,)), [0, 1]))
    assert count_rejected(path, 500, path.parent) > 200


@pytest.mark.parametrize("packed", [False, True])
def test_mnist(tmp_path, packed):
    images, labels = pixels(12, (6, 7)), (np.arange(12) % 10).astype(np.uint8)
    for part, rows in (("train", slice(0, 10)), ("t10k", slice(10, 12))):
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            data = idx(array[rows])
            path = tmp_path / f"{part}-{kind}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(data) if packed else data)
    assert split_counts(tmp_path) == {"train": 10, "test": 2}
    source = pickle.loads(pickle.dumps(open_dataset(tmp_path, "test")))
    assert np.array_equal(source[1].data, images[11])
    assert source.labels().tolist() == [0, 1]
    assert source.name(1) == "test/1"
    path.with_name(path.name.replace("labels-idx1", "images-idx3")).unlink()
    assert split_counts(tmp_path) == {"train": 10}


def test_truncated_mnist_is_rejected(tmp_path):
    data = idx(pixels(10, (6, 7)))
    for name, end in (("train-images-idx3-ubyte", -1), ("train-images-idx3-ubyte.gz", -5)):
        (tmp_path / name).write_bytes(gzip.compress(data)[:end] if end == -5 else data[:end])
        (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(10, np.uint8)))
        with pytest.raises(DataError, match=name):
            list(open_dataset(tmp_path, "all"))
        (tmp_path / name).unlink()
    with pytest.raises(DataError, match="not their images"):
        open_dataset(tmp_path)


def as_images(rows):
    return rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


@pytest.mark.parametrize("protocol", [None, 2, 4])
def test_cifar_10_python(tmp_path, protocol):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    rows = pixels(6, (3072,))
    for name, part in (("data_batch_1", rows[:4]), ("test_batch", rows[4:])):
        labels = list(range(len(part)))
        content = {"data": part, "labels": labels, "filenames": ["x.png"] * len(part)}
        data = pickle.dumps(content, protocol) if protocol else python2_pickle(part, labels)
        (folder / name).write_bytes(data)
    names = pickle.dumps({"label_names": ["plane", "car", "bird", "cat"]}, 2)
    (folder / "batches.meta").write_bytes(names)
    source = open_dataset(tmp_path)
    assert source.classes == ("plane", "car", "bird", "cat")
    assert split_counts(tmp_path) == {"train": 4, "test": 2}
    assert source.name(3) == "data_batch_1/3"
    again = pickle.loads(pickle.dumps(open_dataset(folder, "all")))
    assert np.array_equal([sample.data for sample in again], as_images(rows))
    assert again.labels().tolist() == [0, 1, 2, 3, 0, 1]


def test_binary_cifar_equals_pickles(tmp_path):
    rows, names = pixels(3, (3072,)), [f"kind {i}" for i in range(100)]
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "train").write_bytes(python2_pickle(rows, [5, 7, 99], b"fine_labels"))
    (tmp_path / "python" / "meta").write_bytes(pickle.dumps({"fine_label_names": names}, 2))
    (tmp_path / "binary").mkdir()
    records = np.concatenate([[[1, 5], [2, 7], [3, 99]], rows], axis=1).astype(np.uint8)
    (tmp_path / "binary" / "train.bin").write_bytes(records.tobytes())
    (tmp_path / "binary" / "fine_label_names.txt").write_text("\n".join(names))
    (tmp_path / "ten").mkdir()
    (tmp_path / "ten" / "data_batch_2.bin").write_bytes(records[:, 1:].tobytes())
    a, b, c = (open_dataset(tmp_path / name) for name in ("python", "binary", "ten"))
    assert a.classes == b.classes
    for source in (a, b, c):
        assert source.labels().tolist() == [5, 7, 99]
        assert np.array_equal([sample.data for sample in source], as_images(rows))
    (tmp_path / "ten" / "data_batch_2.bin").write_bytes(records.tobytes()[:-1])
    with pytest.raises(DataError, match="not a multiple of"):
        open_dataset(tmp_path / "ten")


def test_malicious_pickle_runs_no_code(tmp_path):
    trap, path = str(tmp_path / "sprung"), tmp_path / "data_batch_1"

    class Evil:
        def __reduce__(self):
            return os.mkdir, (trap,)

    for protocol in (0, 2, 4):
        path.write_bytes(pickle.dumps({"data": Evil(), "labels": [0]}, protocol))
        with pytest.raises(DataError, match=r"posix\.mkdir, and loading it could run code"):
            open_dataset(tmp_path)
    assert not os.path.exists(trap)
    # BUILD sets attributes of whatever is on the stack, also of a class
    path.write_bytes(b"\x80\x02c_codecs\nencode\nN}X\x04\0\0\0evilK\x01s\x86b.")
    with pytest.raises(DataError, match="it sets the state of a type"):
        open_dataset(tmp_path)
    assert not hasattr(arrays.PickledCall, "evil")


@pytest.mark.parametrize("declared", [2**29, 2**31])
def test_npz_zip_bomb_is_rejected(tmp_path, monkeypatch, declared):
    path, size = tmp_path / "bomb.npz", 2**29
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, shape, dtype in (("x", (size // 2**20, 1024, 1024), "|u1"), ("y", (0,), "<i8")):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                about = {"descr": dtype, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, about)
                for _ in range(shape[0]):
                    file.write(bytes(2**20))
            archive.getinfo(f"{name}.npy").file_size += declared - size if name == "x" else 0
    assert path.stat().st_size < 2**24
    with pytest.raises(DataError, match=r"more than 20 times the file size; .* np\.savez"):
        open_dataset(path, "all")
    monkeypatch.setattr("vitrail.data.arrays.MAX_ARRAYS", 1)
    with pytest.raises(DataError, match="2 arrays, above the limit of 1"):
        open_dataset(path)


# Hugging Face datasets


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    library = pytest.importorskip("datasets", reason="pip install 'vitrail[data]' to run these")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(library.config, "HF_HUB_OFFLINE", True)
    library.disable_progress_bars()
    return library


def make(datasets, length, start=0):
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["ape", "bee"])}
    rows = range(start, start + length)
    images = [{"bytes": png(i), "path": None} for i in rows]
    values = {"image": images, "label": [i % 2 for i in rows]}
    return datasets.Dataset.from_dict(values, features=datasets.Features(kinds))


@pytest.fixture
def parquet(datasets, tmp_path):
    (tmp_path / "set" / "data").mkdir(parents=True)
    for name, table in (("train", make(datasets, 6)), ("validation", make(datasets, 3, 6))):
        table.to_parquet(tmp_path / "set" / "data" / f"{name}-00000-of-00001.parquet")
    return tmp_path / "set"


def test_folder_of_parquet_files(datasets, parquet, tmp_path):
    assert split_counts(parquet) == {"train": 6, "val": 3}
    assert len(open_dataset(next((parquet / "data").glob("train*")), "all")) == 6
    (tmp_path / "parts" / "train.parquet").mkdir(parents=True)  # as Spark writes a table
    make(datasets, 4).to_parquet(tmp_path / "parts" / "train.parquet" / "0.parquet")
    assert split_counts(tmp_path / "parts") == {"train": 4}
    source = open_dataset(parquet, "validation")
    assert source.classes == ("ape", "bee")
    assert source.labels().tolist() == [0, 1, 0]
    assert [sample.data for sample in source] == [png(6), png(7), png(8)]
    assert source.name(2) == "val/2"
    again = pickle.loads(pickle.dumps(source))
    assert again[1] == source[1]
    assert fingerprint(again) == fingerprint(source)
    list(pack(str(parquet), tmp_path / "shards"))
    assert same_samples(open_dataset(tmp_path / "shards", "val"), source)


def test_save_to_disk_with_all_kinds_of_labels(datasets, tmp_path):
    both = datasets.DatasetDict(train=make(datasets, 6), test=make(datasets, 2))
    both.save_to_disk(tmp_path / "both")
    make(datasets, 10).save_to_disk(tmp_path / "one")
    assert split_counts(tmp_path / "both") == {"train": 6, "test": 2}
    assert len(open_dataset(tmp_path / "one", "all")) == 10
    assert [sample.label for sample in open_dataset(tmp_path / "both", "test")] == [0, 1]
    hidden = make(datasets, 2).remove_columns("label").add_column("label", [-1, -1])
    hidden = hidden.cast_column("label", datasets.ClassLabel(names=["ape", "bee"]))
    datasets.DatasetDict(train=make(datasets, 6), test=hidden).save_to_disk(tmp_path / "hidden")
    assert open_dataset(tmp_path / "hidden").notes == ("split test has no labels and was skipped",)
    assert split_counts(tmp_path / "hidden") == {"train": 6}
    images = [{"bytes": png(i), "path": None} for i in range(3)]
    several = datasets.List(datasets.ClassLabel(names=[*"abc"]))
    for name, kind, values, expected in (
        ("labels", several, [[0, 2], [], [1]], [(0, 2), (), (1,)]),
        ("label", datasets.Value("string"), ["b", "a", "b"], [1, 0, 1]),
    ):
        features = datasets.Features({"img": datasets.Image(), name: kind})
        table = datasets.Dataset.from_dict({"img": images, name: values}, features)
        table.save_to_disk(tmp_path / name)
        assert list(open_dataset(tmp_path / name, "all").labels()) == expected


def test_labels_of_a_table_belong_to_their_rows(datasets, tmp_path):
    def save(kind, labels):
        images = [{"bytes": png(i), "path": None} for i in range(len(labels))]
        features = datasets.Features({"image": datasets.Image(), "label": kind})
        return datasets.Dataset.from_dict({"image": images, "label": labels}, features)

    text, number = datasets.Value("string"), datasets.ClassLabel(names=["cat", "dog"])
    path = tmp_path / "a.parquet"
    save(text, ["cat; tabby", "dog", "cat|tabby"]).to_parquet(path)
    source = open_dataset(path, "all")
    assert source.classes == ("cat", "dog", "tabby")
    assert list(source.labels()) == [(0, 2), (1,), (0, 2)]
    save(datasets.List(number), [[0, 1], None, [1]]).to_parquet(path)
    assert list(open_dataset(path, "all").labels()) == [(0, 1), (), (1,)]
    for kind, labels in (
        (text, ["cat", None, "dog", "cat"]),
        (text, ["cat", "", "dog; cat", "cat"]),
        (number, [0, None, 1, 0]),
    ):
        save(kind, labels).to_parquet(path)
        with pytest.raises(DataError, match=r"a\.parquet: row 1 of split train has no label"):
            open_dataset(path, "all")
    splits = {"train": save(text, ["dog", "cat"]), "test": save(text, [None, None])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "hidden")
    assert split_counts(tmp_path / "hidden") == {"train": 2}
    assert open_dataset(tmp_path / "hidden").notes == ("split test has no labels and was skipped",)


def test_single_label_dataset_has_one_label_per_image():
    encoder = SampleEncoder()
    for labels in (("a",), (), ("b",)):
        encoder.add(labels)
    with pytest.raises(DataError, match="set: some images do not have exactly one label"):
        encoder.labels({"a": 0, "b": 1}, ("a", "b"), "set")


def test_library_errors_are_one_line(datasets, tmp_path, monkeypatch):
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
    monkeypatch.setitem(sys.modules, "datasets", None)
    for reference in ("hf:cifar10", tmp_path, tmp_path / "broken.parquet"):
        with pytest.raises(ConfigError, match=r"pip install 'vitrail\[data\]'"):
            open_dataset(reference)


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

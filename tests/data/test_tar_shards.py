import io
import os
import pickle
import random
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_sets import make_folder, pixels, png, same_samples

from fuzzing import count_rejected
from processes import fork
from vitrail.cli.dataset import Pack
from vitrail.data.datasets import Sample, open_dataset, split_counts
from vitrail.data.provenance import fingerprint
from vitrail.data.tar_shards import build_index, expand_braces, pack, write_shards
from vitrail.errors import ConfigError, DataError
from vitrail.planning.request import resident_bytes

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"


def make_tar(path, members, format=tarfile.PAX_FORMAT):
    """A tar of (name, bytes), written by Python's own library."""
    with tarfile.open(path, "w", format=format) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def labeled(labels):
    """Members 0.jpg, 0.cls, 1.jpg, …"""
    return [
        member
        for number, label in enumerate(labels)
        for member in ((f"{number}.jpg", b"x"), (f"{number}.cls", label))
    ]


# Packing


def test_pack_round_trip(tmp_path):
    folder = make_folder(tmp_path / "set", {"train/cat": 5, "train/dog": 7, "val/dog": 2})
    for name in ("shards", "again"):
        shards = list(pack(str(folder), tmp_path / name, max_bytes=5000))
    assert [shard.path.name for shard in shards[:2]] == ["train-000000.tar", "train-000001.tar"]
    assert sum(shard.samples for shard in shards) == 14
    for shard in shards:  # deterministic
        assert shard.path.read_bytes() == (tmp_path / "shards" / shard.path.name).read_bytes()
    assert split_counts(tmp_path / "shards") == {"train": 12, "val": 2}
    for split in ("train", "val"):
        packed = open_dataset(tmp_path / "shards", split)
        assert same_samples(packed, open_dataset(folder, split))
    assert packed.name(0) == "000000000.png"
    assert open_dataset(tmp_path / "shards").name(0) == "train-000000.tar/000000000.png"
    with tarfile.open(tmp_path / "shards" / "train-000000.tar") as tar:
        members = tar.getmembers()
        assert [m.name for m in members[:2]] == ["000000000.png", "000000000.cls"]
        assert {(m.mtime, m.uid, m.mode, m.uname) for m in members} == {(0, 0, 0o644, "")}
        assert tar.extractfile("000000001.cls").read() == b"0"
        assert tar.extractfile("000000001.png").read() == png(1)


def test_arrays_splits_and_multiple_labels_survive_packing(tmp_path):
    for name, shape in (("gray", (6, 7)), ("channel", (6, 7, 1)), ("color", (6, 7, 3))):
        path, images = tmp_path / f"{name}.npz", pixels(5, shape)
        np.savez(path, x_train=images, y_train=np.arange(5))
        list(pack(str(path), tmp_path / name))
        packed = open_dataset(tmp_path / name)
        assert packed.labels().tolist() == [0, 1, 2, 3, 4]
        for sample, image in zip(packed, images, strict=True):
            decoded = np.asarray(Image.open(io.BytesIO(sample.data)))
            assert np.array_equal(decoded, image.reshape(decoded.shape))
    folder = make_folder(tmp_path / "set", {"cat": 20, "dog": 20})
    list(pack(str(folder), tmp_path / "split"))
    for split in ("train", "val", "test"):
        assert same_samples(open_dataset(tmp_path / "split", split), open_dataset(folder, split))
    text = "file,labels\ncat/000.png,b;a\ncat/001.png,\ncat/002.png,c\n"
    (folder / "labels.csv").write_text(text)
    list(pack(str(folder), tmp_path / "multi", split="all"))
    packed = open_dataset(tmp_path / "multi", "all")
    assert packed.multi_label
    assert same_samples(packed, open_dataset(folder, "all"))


def test_pack_writes_whole_shards_and_overwrites_none(tmp_path, capsys):
    folder, shards = make_folder(tmp_path / "set", {"train/cat": 3, "val/cat": 1}), tmp_path / "a"
    Pack(source=str(folder), destination=tmp_path / "text").run()
    assert "train-000000.tar  3 images" in capsys.readouterr().out
    list(pack(str(folder), shards, split="validation"))
    with pytest.raises(DataError, match=r"already contains val-000000\.tar"):
        list(pack(str(folder), shards))
    assert not (shards / "train-000000.tar").exists()
    with pytest.raises(ConfigError, match="max_bytes=0"):
        list(pack(str(folder), tmp_path / "b", max_bytes=0))
    (folder / "train" / "cat" / "003.png").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match="file not found: "):
        list(pack(str(folder), tmp_path / "c"))
    assert list((tmp_path / "c").iterdir()) == []


def test_shards_of_other_classes_are_not_relabeled(tmp_path):
    a = make_folder(tmp_path / "a", {"train/cat": 2, "train/dog": 2, "val/cat": 1})
    b = make_folder(tmp_path / "b", {"val/ant": 1, "val/cat": 1})
    list(pack(str(a), tmp_path / "shards", split="train"))
    with pytest.raises(DataError, match=r"already lists other classes than .*/b;"):
        list(pack(str(b), tmp_path / "shards", split="val"))
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "classes.json").write_text('["cat", "dog"]')  # of no shards so far
    with pytest.raises(DataError, match="already lists other classes"):
        list(pack(str(b), tmp_path / "list"))
    list(pack(str(a), tmp_path / "shards", split="val"))
    for split in ("train", "val"):
        assert same_samples(open_dataset(tmp_path / "shards", split), open_dataset(a, split))


def test_failed_pack_removes_what_it_wrote(tmp_path):
    folder, shards = make_folder(tmp_path / "set", {"train/cat": 3, "val/cat": 3}), tmp_path / "a"
    broken = folder / "val" / "cat" / "003.png"
    broken.symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match="file not found: "):
        list(pack(str(folder), shards))
    assert list(shards.iterdir()) == []
    list(pack(str(folder), shards, split="train"))
    before = {path: path.read_bytes() for path in shards.iterdir()}
    with pytest.raises(DataError, match="file not found: "):
        list(pack(str(folder), shards, split="val", max_bytes=1))
    assert before == {path: path.read_bytes() for path in shards.iterdir()}
    broken.unlink()
    list(pack(str(folder), shards, split="val"))
    assert split_counts(shards) == {"train": 3, "val": 3}
    stopped = pack(str(folder), tmp_path / "b", max_bytes=1)
    path = next(stopped).path
    stopped.close()
    assert list((tmp_path / "b").iterdir()) == [path]


# Reading


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tar_formats(tmp_path, format):
    long = "/".join(["d" * 60] * 3)
    path = make_tar(
        tmp_path / "a.tar",
        [(f"./cat/{long}/1.png", png(1)), (f"cat/{'e' * 80}.png", png(2)), ("dög/3.png", png(3))],
        format,
    )
    source = open_dataset(path, "all")
    assert source.classes == ("cat", "dög")
    assert source.name(0) == f"cat/{long}/1.png"
    assert [sample.data for sample in source] == [png(1), png(2), png(3)]


def test_hidden_member_between_image_and_label_is_ignored(tmp_path):
    """The tar of macOS writes the attributes of each file before it."""
    members = [("0.jpg", b"a"), ("._0.cls", b"x"), ("0.cls", b"dog"), ("1.jpg", b"b")]
    members += [("__MACOSX/1.cls", b"x"), (".x/1.cls", b"x"), ("1.cls", b"cat")]
    source = open_dataset(make_tar(tmp_path / "a.tar", members), "all")
    assert [(sample.data, sample.label) for sample in source] == [(b"a", 1), (b"b", 0)]
    assert source.notes == ()


def test_label_before_or_after_its_image_is_a_name_or_class_id(tmp_path):
    members = [
        ("x/1.cls", b"1\n"), ("x/1.jpg", b"a"),
        ("x/2.b.jpg", b"b"), ("x/2.json", b'{"label": 0, "more": [1]}'), ("x/2.seg.png", b"mask"),
        ("x/3.JPG", b"c"),
        ("._x/4.jpg", b"d"), ("x/._4.jpg", b"d"),
    ]  # fmt: skip
    source = open_dataset(make_tar(tmp_path / "a.tar", members), "all")
    assert [(sample.data, sample.label) for sample in source] == [(b"a", 1), (b"b", 0)]
    assert source.classes == ("0", "1")
    assert "1 images without a label were skipped" in source.notes[0]
    source = open_dataset(make_tar(tmp_path / "b.tar", labeled([b"dog", b"cat"])), "all")
    assert source.classes == ("cat", "dog")
    assert source.labels().tolist() == [1, 0]
    path = make_tar(tmp_path / "a.tar", labeled([b"1", b"2"]))
    assert open_dataset(path, "all").classes == ("0", "1", "2")
    (tmp_path / "classes.json").write_text('["1", "2", "10"]')  # names that look like numbers
    assert open_dataset(path, "all").labels().tolist() == [1, 2]
    (tmp_path / "classes.json").write_text('["a", "b"]')
    with pytest.raises(DataError, match="unknown label '2'"):
        open_dataset(path, "all")
    (tmp_path / "classes.json").unlink()
    make_tar(path, labeled([b"9" * 5000]))
    with pytest.raises(DataError, match="is not a class id"):
        open_dataset(path)


def test_splits_in_names_of_shards(tmp_path):
    make_tar(tmp_path / "set-train-0.tar", labeled([b"5"]))
    make_tar(tmp_path / "set-val-0.tar", labeled([b"0"]))
    assert len(open_dataset(tmp_path, "val").classes) == 6  # the same in every split
    (tmp_path / "set-train-0.tar").rename(tmp_path / "set-train-2.tar")
    make_tar(tmp_path / "set-train-0.tar", labeled([b"5"]))
    assert open_dataset(tmp_path).notes == ("set-train-1.tar is missing",)
    for split, label in (("train", b"a"), ("validation", b"b")):
        (tmp_path / "folders" / split).mkdir(parents=True)
        make_tar(tmp_path / "folders" / split / "000.tar", labeled([label]))
    assert split_counts(tmp_path / "folders") == {"train": 1, "val": 1}
    assert open_dataset(tmp_path / "folders", "val")[0].label == 1


@pytest.mark.parametrize("pattern", ["{}/*/000.tar", "{{{}/a,b}}/000.tar"])
def test_images_in_equally_named_shards_have_different_names(tmp_path, monkeypatch, pattern):
    monkeypatch.chdir(tmp_path)
    for part in ("a", "b"):
        (tmp_path / part).mkdir()
        make_tar(tmp_path / part / "000.tar", labeled([b"0"]))
    names = [sample.name for sample in open_dataset(pattern.format(tmp_path), "all")]
    assert names == ["a/000.tar/0.jpg", "b/000.tar/0.jpg"]


def test_class_folders_or_a_list_in_a_tar(tmp_path):
    members = [(f"photos/{kind}/{i}.jpg", b"x") for kind in ("cat", "dog") for i in range(3)]
    assert open_dataset(make_tar(tmp_path / "a.tar", members), "all").classes == ("cat", "dog")
    members = [(f"{split}/cat/1.jpg", b"x") for split in ("train", "val")]
    assert split_counts(make_tar(tmp_path / "b.tar", members)) == {"train": 1, "val": 1}
    text = b"file,split,class\nb.jpg,train,x\n./a.jpg,test,y\n"
    path = make_tar(tmp_path / "c.tar", [("labels.csv", text), ("a.jpg", b"a"), ("b.jpg", b"b")])
    assert open_dataset(path, "test")[0][:2] == (b"a", 1)
    path = make_tar(tmp_path / "d.tar", [("labels.csv", text), ("a.jpg", b"a")])
    with pytest.raises(DataError, match=r"labels\.csv lists b\.jpg, which is not in the tar"):
        open_dataset(path)


def test_shard_patterns(tmp_path):
    for number in range(12):
        make_tar(tmp_path / f"p-{number:02}.tar", labeled([b"0"]))
    assert len(open_dataset(tmp_path / "p-{00..09}.tar", "all")) == 10
    assert len(open_dataset(str(tmp_path / "p-0?.tar"), "all")) == 10
    assert len(open_dataset(f"file://{tmp_path}/p-{{03,11}}.tar", "all")) == 2
    assert list(expand_braces("{a,b}-{8..10}")) == ["a-8", "a-9", "a-10", "b-8", "b-9", "b-10"]
    folder = tmp_path / "photos [of {2..3} *]"  # a name, not a pattern
    folder.mkdir()
    make_tar(folder / "a[1].tar", labeled([b"0"]))
    assert len(open_dataset(folder, "all")) == len(open_dataset(folder / "a[1].tar", "all")) == 1
    make_folder(folder, {"cat": 3})  # images win over tars beside them
    assert open_dataset(folder, "all").classes == ("cat",)


def test_remote_shards(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    folder = make_folder(tmp_path / "set", {"train/cat": 3, "train/dog": 3, "val/dog": 2})
    list(pack(str(folder), tmp_path / "shards", max_bytes=5000))
    memory = fsspec.filesystem("memory")
    try:
        for path in (tmp_path / "shards").iterdir():
            memory.pipe(f"/bucket/{path.name}", path.read_bytes())
        assert split_counts("memory://bucket") == {"train": 6, "val": 2}
        for end in ("", "train-*.tar", "train-{000000..000002}.tar"):
            source = pickle.loads(pickle.dumps(open_dataset(f"memory://bucket/{end}")))
            assert same_samples(source, open_dataset(folder))
        with pytest.raises(DataError, match=r"memory://bucket/none\.tar"):
            open_dataset("memory://bucket/none.tar")
    finally:
        memory.rm("/bucket", recursive=True)


def stream(folder):
    """Print the number of images, and the peak memory after a tenth of them and in the end."""
    dataset, peaks = open_dataset(folder), []
    for step, index in enumerate(np.random.default_rng(0).permutation(len(dataset)).tolist()):
        data, label, _ = dataset[index]
        assert data.endswith(index.to_bytes(8, "little"))
        assert label == index % 100
        if step in (len(dataset) // 10, len(dataset) - 1):
            peaks.append(resident_bytes("VmHWM") / 2**20)  # ru_maxrss would include the parent's
    print(len(dataset), *peaks)


def test_memory_is_flat_when_streaming(tmp_path):
    class Tiny:  # a PNG's signature and a number
        classes = tuple(map(str, range(100)))

        def __len__(self):
            return 12_000

        def __getitem__(self, index):
            return Sample(b"\x89PNG\r\n\x1a\n" + index.to_bytes(8, "little"), index % 100, "")

    (tmp_path / "shards").mkdir()
    list(write_shards(Tiny(), tmp_path / "shards", "train", 32 * 2**20))
    process = fork(stream, tmp_path / "shards", output=tmp_path / "output")
    process.join()
    count, early, late = map(float, (tmp_path / "output").read_text().split())
    assert count == 12_000
    assert late - early < 1


# Cached index


def test_cached_index_is_optional_and_valid_only_for_the_same_file(tmp_path, monkeypatch):
    path = make_tar(tmp_path / "NAME.tar", [("cat/1.jpg", b"one"), ("dog/2.jpg", b"two")])
    with monkeypatch.context() as patch:
        # too long for a file name, so that no temporary file can be created
        patch.setattr("vitrail.data.storage.token_hex", lambda _: 300 * "x")
        first = fingerprint(open_dataset(path, "all"))
    tmp_path.chmod(0o555)  # root could write here all the same
    try:
        assert fingerprint(open_dataset(path, "all")) == first
    finally:
        tmp_path.chmod(0o755)
    assert list(tmp_path.iterdir()) == [path]
    open_dataset(path, "all")
    (cache,) = set(tmp_path.iterdir()) - {path}
    assert f"`{cache.name}`" in (DOCS / "commands.md").read_text(encoding="utf-8")
    before = cache.stat().st_mtime_ns
    assert fingerprint(open_dataset(path, "all")) == first
    assert cache.stat().st_mtime_ns == before
    cache.write_bytes(cache.read_bytes()[:100])  # broken: built again
    assert fingerprint(open_dataset(path, "all")) == first
    make_tar(path, [("cat/1.jpg", b"one"), ("dog/2.jpg", b"two"), ("dog/3.jpg", b"three")])
    assert len(open_dataset(path, "all")) == 3
    cache.unlink()
    os.mkfifo(cache)  # reading it would block
    assert len(open_dataset(path, "all")) == 3


@pytest.mark.parametrize(
    ("column", "change"),
    [
        ("offsets", lambda x: x + 10**6),
        ("offsets", lambda x: x - 10**6),
        ("sizes", lambda x: x + 2**40),  # this much memory would be asked for
        ("sizes", lambda x: -x),
        ("sizes", lambda x: 0 * x + 2**62),
        ("offsets", lambda x: x[:1]),
        ("name_ends", lambda x: x[::-1].copy()),
        ("name_ends", lambda x: x + 1000),
        ("label_ends", lambda x: x - 1),
        ("first", lambda x: x[:0]),
        ("about", lambda _: np.frombuffer(b'{"texts": [], "others": 0, "damage": ""}', np.uint8)),
        ("about", lambda _: np.frombuffer(b"[" * 10**5, np.uint8)),
        ("about", lambda _: np.array([{}], object)),
    ],
)
def test_impossible_cached_index_is_ignored(tmp_path, column, change):
    """It is beside the tar, and may have come with it from anybody."""
    path = make_tar(tmp_path / "a.tar", [("cat/1.jpg", b"one"), ("dog/2.jpg", b"two")])
    before, index = list(open_dataset(path, "all")), tmp_path / ".a.tar.index.npz"
    with np.load(index) as cached:
        arrays = dict(cached)
    np.savez(index, **arrays | {column: change(arrays[column])})
    assert list(open_dataset(path, "all")) == before


def test_index_of_an_earlier_version_is_rebuilt(tmp_path):
    path = make_tar(tmp_path / "a.tar", [("cat/1.jpg", b"one"), ("dog/2.jpg", b"two")])
    before, index = list(open_dataset(path, "all")), tmp_path / ".a.tar.index.npz"
    with np.load(index) as cached:
        arrays = dict(cached)
    stale = arrays | {"stamp": arrays["stamp"] - [1, 0, 0], "offsets": arrays["offsets"][::-1]}
    np.savez(index, **stale)
    assert list(open_dataset(path, "all")) == before
    with np.load(index) as cached:
        assert cached["stamp"].tolist() == arrays["stamp"].tolist()


# Damaged and hostile files


def test_truncated_tar_needs_allow_truncated(tmp_path):
    members = [(f"cat/{number}.jpg", bytes([number]) * 700) for number in range(10)]
    whole = make_tar(tmp_path / "whole.tar", members).read_bytes()
    path = tmp_path / "a.tar"
    for length in random.Random(0).sample(range(1, 10 * 1536 + 512), 60):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError) as error:
            open_dataset(path, "all")
        assert str(path) in str(error.value)
        count = sum(length >= 1536 * n + 512 + 700 for n in range(10))
        if count:
            assert f"intact up to cat/{count - 1}.jpg, {count} images" in str(error.value)
            part = open_dataset(path, "all", allow_truncated=True)
            assert [sample.data for sample in part] == [data for _, data in members[:count]]
            assert "intact" in part.notes[0]
    source = open_dataset(tmp_path / "whole.tar", "all")
    (tmp_path / "whole.tar").write_bytes(whole[:2000])  # after it was indexed
    source[0]
    with pytest.raises(DataError, match="truncated or modified"):
        source[1]


def test_corrupt_tars_never_crash(tmp_path):
    members = [("labels.csv", b"file,class\n1.jpg,a\n2.jpg,b\n"), ("1.jpg", b"x"), ("2.jpg", b"y")]
    members += [("3.jpg", b"x"), ("3.json", b'{"labels": [1, 2]}'), ("p" * 150 + ".jpg", b"z")]
    path = make_tar(tmp_path / "a.tar", members)
    whole = path.read_bytes()
    for allow_truncated in (False, True):
        path.write_bytes(whole)
        assert count_rejected(path, 200, allow_truncated=allow_truncated) < 190  # some open


def member(name, data, kind=tarfile.REGTYPE):
    info = tarfile.TarInfo(name)
    info.size, info.type = len(data), kind
    return info.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % 512)


IMAGE = member("cat/1.jpg", b"x") + bytes(1024)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"\x1f\x8b" + bytes(2000), "is not a .tar file, or is compressed"),
        (bytes(10240), "contains no images"),
        (member("x", bytes(2**17), tarfile.GNUTYPE_LONGNAME) + IMAGE,
         "a long name has 131,072 bytes, above the limit of 65,536"),
    ],
    ids=["empty", "compressed", "zeros", "long name"],
)  # fmt: skip
def test_other_files_are_not_tars(tmp_path, data, message):
    (tmp_path / "a.tar").write_bytes(data)
    with pytest.raises(DataError, match=message):
        open_dataset(tmp_path / "a.tar")


def test_images_of_one_label_share_its_bytes(tmp_path):
    path = tmp_path / "a.tar"
    images = b"".join(member(f"a.{number}.jpg", b"") for number in range(1000))
    path.write_bytes(images + member("a.cls", b"9" * 2**20) + bytes(1024))
    assert len(build_index(str(path)).labels.bytes) == 2**20


@pytest.mark.parametrize("size", ["\u00b2", "9" * 5000, "-1", "1_0", ""])
def test_invalid_pax_size_is_ignored(tmp_path, size):
    record = f" size={size}\n".encode()
    length = len(record) + 1
    while len(str(length).encode() + record) != length:
        length += 1
    header = member("x", str(length).encode() + record, tarfile.XHDTYPE)
    (tmp_path / "a.tar").write_bytes(header + IMAGE)
    assert open_dataset(tmp_path / "a.tar", "all")[0].data == b"x"

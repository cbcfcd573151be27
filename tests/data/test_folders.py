import json
import os

import pytest
from tiny_sets import make_folder, png

from tiny_models import awake
from vitrail import save
from vitrail.cli import main
from vitrail.data.datasets import open_dataset, split_counts
from vitrail.data.storage import allow_outside
from vitrail.errors import DataError


def write(tmp_path, name, text):
    (tmp_path / "images").mkdir(exist_ok=True)
    for number in range(3):
        (tmp_path / "images" / f"{number}.png").write_bytes(png(number))
    (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path / name


ONE_LABEL = (
    ("a.csv", "file,class\nimages/0.png,dog\nimages/1.png,cat\nimages/2.png,dog\n"),
    ("a.csv", "\ufeffClass ,Path\r\ndog,images/0.png\r\ncat,images/1.png\r\ndog,images/2.png"),
    ("a.csv", "image;label\nimages/0.png;dog\nimages/1.png;cat\nimages/2.png;dog\n"),
    ("a.tsv", "file\tlabel\nimages/0.png\tdog\nimages/1.png\tcat\nimages/2.png\tdog\n"),
    ("a.jsonl", '{"file":"images/0.png","label":"dog"}\n\n{"path":"images/1.png","class":"cat"}\n'
                '{"image":"images/2.png","label":"dog"}'),
)  # fmt: skip
SEVERAL_OR_NONE = (
    ("a.csv", "file,labels\nimages/0.png,b;a\nimages/1.png,\nimages/2.png,c\n"),
    ("a.csv", "file,labels\nimages/0.png,b | a\nimages/1.png,\nimages/2.png,c\n"),
    ("a.csv", 'file,labels\nimages/0.png,"[""b"", ""a""]"\nimages/1.png,[]\nimages/2.png,c\n'),
    ("a.csv", "file,label\nimages/0.png,b;a\nimages/1.png,[]\nimages/2.png,c\n"),
    ("a.jsonl", '{"file":"images/0.png","labels":["b","a"]}\n{"file":"images/1.png","labels":[]}\n'
                '{"file":"images/2.png","labels":["c","c"]}'),
)  # fmt: skip


@pytest.mark.parametrize(("name", "text"), ONE_LABEL + SEVERAL_OR_NONE)
def test_list_formats_with_one_label_or_several_or_none(tmp_path, name, text):
    source = open_dataset(write(tmp_path, name, text), "all")
    classes, labels = ("cat", "dog"), [1, 0, 1]
    if source.multi_label:
        classes, labels = ("a", "b", "c"), [(1, 0), (), (2,)]
    assert source.multi_label == ((name, text) in SEVERAL_OR_NONE)
    assert (source.classes, list(source.labels())) == (classes, labels)
    assert [sample.label for sample in source] == labels
    assert [sample.data for sample in source] == [png(number) for number in range(3)]
    assert source.name(2) == "images/2.png"


def test_list_with_splits_or_numeric_classes(tmp_path):
    rows = [f"images/{n}.png,cat,{s}" for n, s in enumerate(["Validation", "train", "fold 7"])]
    path = write(tmp_path, "labels.csv", "\n".join(["file,class,split", *rows]))
    assert split_counts(path) == {"train": 1, "val": 1, "fold 7": 1}
    assert open_dataset(tmp_path, "val").name(0) == "images/0.png"  # the folder stands for it
    assert open_dataset(path, "fold 7").name(0) == "images/2.png"
    names = ["9" * 5000, "10", "9", "09"]  # `int` rejects thousands of digits
    text = "file,label\n" + "".join(f"images/0.png,{name}\n" for name in names)
    source = open_dataset(write(tmp_path, "a.csv", text), "all")
    assert source.classes == ("09", "9", "10", names[0])


def test_labels_that_are_numbers_are_not_rounded(tmp_path):
    labels = (1000001.0, 1000002.0, 3, 3.0, 0.5)  # floats, as of a column with missing values
    rows = [json.dumps({"file": "images/0.png", "label": label}) for label in labels]
    source = open_dataset(write(tmp_path, "a.jsonl", "\n".join(rows)), "all")
    named = [source.classes[label] for label in source.labels()]
    assert named == ["1000001", "1000002", "3", "3", "0.5"]


@pytest.mark.parametrize(
    ("name", "classes"),
    [
        ("classes.txt", "dog\n\ncat\n"),
        ("classes.json", '["dog", "cat"]'),
        ("classes.json", '{"cat": 1, "dog": 0}'),
        ("classes.json", '{"0": "dog", "1": "cat"}'),
        ("classes.json", '{"classes": ["dog", "cat"]}'),
    ],
)
def test_class_file_defines_the_order(tmp_path, name, classes):
    (tmp_path / name).write_text(classes)
    text = "file,label\nimages/0.png,cat\nimages/1.png,0\n"
    source = open_dataset(write(tmp_path, "a.csv", text), "all")
    assert source.classes == ("dog", "cat")
    assert source.labels().tolist() == [1, 0]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "", "lists no images"),
        ("a.csv", "file,label\n", "lists no images"),
        ("a.csv", "name,label\nx,y\n", r"no file column \(.*\); its columns: name, label"),
        ("a.csv", "file,size\nx,y\n", r"no label column \(label, .*\); its columns: file, size"),
        ("a.csv", "file,label\nx.png,\n", "line 2 has no label"),
        ("a.csv", "file,label\n,cat\n", "line 2 has no file name"),
        ("a.csv", "file,label\nx.png,cat,3\n", "line 2 has more cells"),
        ("a.csv", "file,label,split\nx.png,cat,train\ny.png,cat,\n", "some images have a split"),
        ("a.csv", 'file,label\nx.png,"' + "y" * 200_000, "field larger"),
        ("a.jsonl", '{"file": "x.png", "label": "a"}\n{', "line 2 is not a JSON object"),
        ("a.jsonl", "[" * 100_000, "line 1 is not a JSON object"),
        ("a.jsonl", '{"file": 3, "label": "a"}', "line 1 has no file name"),
        ("a.csv", "\xff\xfe\0", "cannot read"),
        ("a.csv", f"file,label{',c' * 2000}\n" + "a,b\n" * 100,
         "2,002 columns, above the limit of 1,000"),
    ],
)  # fmt: skip
def test_invalid_lists_give_one_line_errors(tmp_path, name, text, message):
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=message) as error:
        open_dataset(tmp_path / name)
    assert "\n" not in str(error.value)


def test_invalid_class_files_and_missing_files_are_rejected(tmp_path):
    path = write(tmp_path, "a.csv", "file,label\nimages/0.png,cow\n")
    for classes in ("{", "[]", '["a", "a"]', '{"a": 5}', "3"):
        (tmp_path / "classes.json").write_text(classes)
        with pytest.raises(DataError, match=r"classes\.json"):
            open_dataset(path)
    (tmp_path / "classes.json").write_text('["dog", "cat"]')
    with pytest.raises(DataError, match="unknown label 'cow'; the 2 classes are dog, cat"):
        open_dataset(path)
    (tmp_path / "classes.json").unlink()
    path = write(tmp_path, "a.jsonl", json.dumps({"file": "gone.png", "label": 3}))
    source = open_dataset(path, "all")
    assert source.labels().tolist() == [0]
    with pytest.raises(DataError, match="file not found: "):
        source[0]
    os.mkfifo(tmp_path / "b.csv")
    with pytest.raises(DataError):  # and reading does not block
        open_dataset(tmp_path / "b.csv")


KEY = b"-----BEGIN OPENSSH PRIVATE KEY-----\nsecret\n"


@pytest.fixture
def outsider(tmp_path):
    """A data set folder with one image, and a private key beside the folder."""
    (tmp_path / "id_rsa").write_bytes(KEY)
    (tmp_path / "elsewhere.png").write_bytes(png(7))
    return make_folder(tmp_path / "set", {"cat": 1})


def links(folder):
    (folder / "link.png").symlink_to(folder.parent / "elsewhere.png")
    (folder / "linked").symlink_to(folder.parent)
    (folder / "inner.png").symlink_to(folder / "cat" / "000.png")


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_list_may_not_leave_its_folder_unless_allowed(outsider, kind):
    links(outsider)
    for name in ("../elsewhere.png", "cat/../../elsewhere.png", f"{outsider.parent}/elsewhere.png",
                 "link.png", "linked/elsewhere.png", "linked/../elsewhere.png",
                 "linked/gone.png"):  # fmt: skip
        row = json.dumps({"file": name, "label": "x"})
        text = row if kind == "jsonl" else f"file,class\n{name},x"
        (outsider / f"labels.{kind}").write_text(text)
        with pytest.raises(DataError, match=r"which is outside .*--allow-outside") as error:
            open_dataset(outsider, "all")
        assert "\n" not in str(error.value)
        with allow_outside():
            source = open_dataset(outsider, "all")
        if os.path.exists(outsider / name):
            assert source[0].data == png(7)  # decided when it was opened


def test_path_that_returns_into_the_folder_is_inside(outsider, tmp_path):
    links(outsider)
    for name in ("./cat/../cat/000.png", f"{outsider}/cat/000.png", "inner.png",
                 "linked/set/cat/000.png", "cat/000.png"):  # fmt: skip
        (outsider / "labels.csv").write_text(f"file,class\n{name},x\n")
        assert open_dataset(outsider, "all")[0].data == png(0)
    (tmp_path / "alias").symlink_to(outsider)
    assert open_dataset(tmp_path / "alias", "all")[0].data == png(0)
    make_folder(tmp_path / "store", {"dog": 2})
    (outsider / "labels.csv").unlink()
    (outsider / "linked").unlink()
    (outsider / "dog").symlink_to(tmp_path / "store" / "dog")  # linked class folders are allowed
    assert len(open_dataset(outsider, "all")) == 3


def test_pack_copies_no_private_key(outsider, tmp_path, capsys):
    """Reported attack: a downloaded labels.csv names the key of whoever packs it."""
    listed = outsider / "labels.csv"
    listed.write_text("file,class\ncat/000.png,a\n../id_rsa,b\n")
    shards = tmp_path / "shards"
    assert main(["pack", str(outsider), str(shards), "--split", "all"]) == 2
    assert "--allow-outside" in capsys.readouterr().err
    assert not list(shards.glob("*.tar"))
    packed = ["pack", str(outsider), str(shards), "--split", "all", "--allow-outside"]
    assert main(packed) == 0
    assert "skipped, not an image: ../id_rsa" in capsys.readouterr().out
    assert len(open_dataset(shards, "all")) == 1
    assert KEY not in (shards / "all-000000.tar").read_bytes()


def test_pack_skips_and_lists_other_files(tmp_path, capsys):
    folder = make_folder(tmp_path / "set", {"train/cat": 3})
    for name in ("001.jpg", "zz.png"):
        (folder / "train" / "cat" / name).write_bytes(KEY)
    shards = tmp_path / "shards"
    assert main(["pack", str(folder), str(shards), "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["left_out"] == ["train/cat/001.jpg", "train/cat/zz.png"]
    assert done["splits"]["train"]["samples"] == 3 == len(open_dataset(shards))
    make_folder(tmp_path / "none", {"train/cat": 1})
    (tmp_path / "none/train/cat/000.png").write_bytes(KEY)
    assert main(["pack", str(tmp_path / "none"), str(tmp_path / "other")]) == 2
    assert "none of its 1 files is an image" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", ["check", "evaluate MODEL", "train", "fewshot MODEL", "finetune --from MODEL"]
)
def test_commands_reject_files_outside(outsider, words, capsys, tiny):
    (outsider / "labels.csv").write_text("file,class\ncat/000.png,a\n../elsewhere.png,b\n")
    save(awake(tiny), outsider.parent / "model")
    words = words.replace("MODEL", str(outsider.parent / "model")).split()
    if words == ["check"]:
        assert main(["check", str(outsider), "--allow-outside"]) == 0
    assert main([*words, str(outsider)]) == 2  # the permission ends with the command
    assert "--allow-outside" in capsys.readouterr().err

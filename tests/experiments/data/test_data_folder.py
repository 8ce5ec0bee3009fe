"""data=folder: a user's own pictures, from files on disk to a trained and sampled model."""

import pytest
import torch
from data_tools import picture, refused

from experiments import run, sample
from experiments.config import load
from experiments.data import DataError, create, picture_folder
from experiments.data.data_options import contents_lines
from experiments.data.registry import parse
from experiments.runtime.command import run_command
from routing.rng import Draws

SIDE = 8
COLOURS = {"cat": (250, 10, 20), "dog": (30, 240, 60), "fish": (5, 80, 200)}


def class_folders(root, count=10, names=tuple(COLOURS)):
    for name in names:
        for number in range(count):
            picture(root / name / f"{number}.png", COLOURS[name])
    return root


def options(root, **more):
    return {"name": "folder", "path": str(root), "size": SIDE, **more}


def pixels_of(data, split):
    """Pixels and labels of a split."""
    batch = data.batch(torch.arange(data.sizes[split]), None, split)
    return data.to_pixels(batch.x).numpy(), batch.y


def test_class_folders_are_classes_with_a_share_of_each_held_out(tmp_path):
    data = create(options(class_folders(tmp_path), test_fraction=0.3))
    assert data.class_names == ("cat", "dog", "fish") and data.num_classes == 3
    assert data.shape == (3, SIDE, SIDE) and data.sizes == {"train": 21, "test": 9}
    for split, each in (("train", 7), ("test", 3)):
        pixels, labels = pixels_of(data, split)
        assert labels.bincount().tolist() == [each] * 3
        for image, label in zip(pixels, labels.tolist(), strict=True):
            assert image[:, 3, 5].tolist() == list(COLOURS[data.class_names[label]])
            assert image[:, 3, 0].tolist() == [value // 2 for value in image[:, 3, 5].tolist()]
    assert parse(options(tmp_path)).describe()["num_classes"] == 3


@pytest.mark.parametrize("test", ["test", "Validation"])
def test_split_folders_are_the_split_and_classes_match_by_name(tmp_path, test):
    class_folders(tmp_path / "train", 4)
    class_folders(tmp_path / test, 2, ("dog", "fish"))
    data = create(options(tmp_path))
    assert data.class_names == ("cat", "dog", "fish")
    assert data.sizes == {"train": 12, "test": 4}
    pixels, labels = pixels_of(data, "test")
    assert labels.tolist() == [1, 1, 2, 2]
    assert pixels[2, :, 3, 5].tolist() == list(COLOURS["fish"])
    picture(tmp_path / test / "zebra/0.png")
    with pytest.raises(DataError, match="the class zebra, unlike"):
        create(options(tmp_path))


def test_a_lone_train_folder_is_split_and_a_class_may_be_called_train(tmp_path):
    class_folders(tmp_path / "a/train")
    assert create(options(tmp_path / "a")).sizes == {"train": 24, "test": 6}
    for name in ("train", "bus"):
        picture(tmp_path / "b" / name / "0.png")
        picture(tmp_path / "b" / name / "1.png")
    assert create(options(tmp_path / "b")).class_names == ("bus", "train")


def test_pictures_without_classes_train_without_a_condition(tmp_path):
    for number in range(10):
        picture(tmp_path / f"{number}.png", (20 * number, 0, 0))
    data = create(options(tmp_path), task="none")
    assert data.num_classes == 0 and data.class_names == ()
    assert data.sizes == {"train": 8, "test": 2}
    assert data.batch(torch.arange(3)).y is None
    with pytest.raises(DataError, match="use task=none guidance=none"):
        create(options(tmp_path))
    assert parse(options(tmp_path)).describe()["num_classes"] == 0


def test_grey_and_mirrored_pictures(tmp_path):
    root, index = class_folders(tmp_path, 20), torch.arange(48)
    grey = create(options(root, channels=1))
    assert grey.shape == (1, SIDE, SIDE)
    luminance = [round(0.299 * r + 0.587 * g + 0.114 * b) for r, g, b in COLOURS.values()]  # ITU-R 601-2
    assert set(pixels_of(grey, "train")[0][:, 0, 3, 5].tolist()) == set(luminance)
    data, draws = create(options(root, flip="mirror")), Draws(0, 3, index)
    plain, seen = data.batch(index).x, data.batch(index, draws).x
    mirrored = (seen == plain.flip(-1)).flatten(1).all(1)
    assert 10 < mirrored.sum() < 38 and torch.equal(seen[~mirrored], plain[~mirrored])
    assert torch.equal(data.batch(index[7:9], Draws(0, 3, index[7:9])).x, seen[7:9])
    assert torch.equal(data.batch(index[:12], draws, "test").x, data.batch(index[:12], None, "test").x)


def test_links_are_followed_and_damaged_pictures_are_skipped_with_a_warning(tmp_path):
    root = class_folders(tmp_path / "pictures")
    picture(tmp_path / "elsewhere/0.png", (200, 200, 0))
    picture(tmp_path / "elsewhere/1.png", (200, 200, 0))
    (root / "linked").symlink_to(tmp_path / "elsewhere")
    (root / "cat/gone.png").symlink_to(tmp_path / "nowhere.png")
    (root / "cat/loop").symlink_to(root)
    (root / "dog/a.png").write_bytes(b"no picture")
    with pytest.warns(UserWarning, match=r"skipped 2 of 34 .* such as cat/gone.png \(No such file"):
        data = create(options(root))
    assert data.class_names == ("cat", "dog", "fish", "linked") and sum(data.sizes.values()) == 32


def test_a_folder_of_unreadable_pictures_is_a_class_without_pictures(tmp_path):
    root = class_folders(tmp_path, names=("cat", "fish"))
    (root / "dog").mkdir()
    (root / "dog/0.png").write_bytes(b"no picture")
    (root / "empty").mkdir()
    with pytest.warns(UserWarning) as warned:
        data = create(options(root))
    skipped, empty = (str(warning.message) for warning in warned)
    assert "skipped 1 of 21" in skipped and "1 of 3 classes have no training sample, such as dog" in empty
    assert data.class_names == ("cat", "dog", "fish") and data.num_classes == parse(options(root)).describe()["num_classes"]
    assert {int(label) for split in ("train", "test") for label in pixels_of(data, split)[1]} == {0, 2}


def test_the_fingerprint_follows_names_and_contents(tmp_path):
    root = class_folders(tmp_path / "a")
    words = [f"data.path={root}", "data=folder"]
    config, contents = load(words), create(options(root))
    run_folder, before = config.folder, parse(options(root)).fingerprint()
    (root / "notes.txt").write_text("not a picture")
    assert parse(options(root)).fingerprint() == before
    copy = create(options(class_folders(tmp_path / "b")))
    assert copy.fingerprint == contents.fingerprint
    assert parse(options(tmp_path / "b")).fingerprint() == before
    picture(root / "cat/99.png")
    assert parse(options(root)).fingerprint() != before
    assert config.folder == run_folder != load(words).folder  # a run that trains keeps its folder
    assert create(options(root)).fingerprint != contents.fingerprint
    assert parse(options(tmp_path / "nowhere")).fingerprint() == "absent"


def test_more_pixels_than_memory_should_hold_are_refused_unread(tmp_path, monkeypatch):
    root = class_folders(tmp_path)
    monkeypatch.setattr(picture_folder, "MAX_BYTES", 30 * 3 * SIDE * SIDE)
    parse(options(root)).check_files()
    picture(root / "cat/one_more.png")
    with pytest.raises(DataError, match=r"31 pictures .*expected at most .* GB.*prepare\.py"):
        parse(options(root)).check_files()
    parse(options(root, channels=1)).check_files()


def test_other_layouts_and_missing_folders_are_one_sentence(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("beside/0.png", "beside/cat/0.png", "unlike/train/cat/0.png", "unlike/test/0.png"):
        picture(tmp_path / name)
    for name, message in {
        "beside": "is beside the class folders",
        "unlike": "holds no classes, unlike",
        "nowhere": "is no folder",
    }.items():
        refused(parse(options(tmp_path / name)).check_files, message)
    with pytest.raises(DataError, match="empty holds no images: .* found nothing$"):  # no kind of files to choose
        parse(options(tmp_path / "empty")).check_files()
    refused(parse({"name": "folder"}).check_files, "needs your pictures: data.path=DIR")


def test_counts_and_classes_are_printed_before_anything_is_decoded(tmp_path):
    root = class_folders(tmp_path)
    data = create(options(root, test_fraction=0.3))
    [line] = contents_lines(data.sizes, data.class_names, "class")
    assert line == "data        21 training pictures, 9 held out, 3 classes: cat, dog, fish"
    assert parse(options(root, test_fraction=0.3)).contents_lines("class") == [line]  # nothing is decoded


@pytest.mark.slow
def test_from_a_folder_to_samples_of_a_class_by_its_name(tmp_path, capsys):
    root = class_folders(tmp_path / "pictures")
    words = ["data=folder", f"data.path={root}", "data.size=8", "size=T/2", "route=2-8"]
    words += ["train.steps=4", "train.batch=4", f"paths.runs={tmp_path / 'runs'}"]
    assert run_command(run.main, words) == 0
    assert "scores at step 4: held-out loss of the EMA on " in capsys.readouterr().out
    [folder] = (tmp_path / "runs").glob("dit-T2-folder_2-8_s0-*")
    out = tmp_path / "samples"
    words = [str(folder), "--out", str(out), "--seeds", "0-1", "--classes"]
    assert run_command(sample.main, [*words, "dog,fish"]) == 0
    assert len(list(out.glob("png/**/*.png"))) == 4
    assert run_command(sample.main, [*words, "horse"]) == 2
    assert "there are cat, dog, fish" in capsys.readouterr().err

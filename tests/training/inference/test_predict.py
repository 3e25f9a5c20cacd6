"""A trained model after its training: exported, and used on image files. It predicts what it predicted in its test."""

import csv
import io
import json
import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.trainings import Ask, Starter, documented, make_folder, make_idx

from hpc.base.errors import TorchrelayError, UserError
from hpc.base.text import csv_text
from training.data.in_memory import read_idx_pair
from training.inference import export
from training.inference.classifier import load_classifier
from training.inference.exported_model import FORMATS, Format, require_packages
from training.inference.model_card import read_card

# Scaled from 12 to 16 pixels on the device; more classes than five.
IDX = ("--epochs=16", "--batch-size=20", "--lr=0.05", "--image-size=16", "--ema-decay=0.5")
FOLDER = ("--epochs=3", "--batch-size=9", "--lr=0.02", "--model=resnet20", "--image-size=16", "--head-hidden=8")
FOLDER += ("--eval-image-size=24", "--eval-crop-pct=24/28", "--interpolation=bicubic")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on IDX files of 8 classes, and its test images as PNG files, in `images`."""
    directory = tmp_path_factory.mktemp("digits")
    data = make_idx(directory / "data", classes=8)
    (directory / "images").mkdir()
    for number, image in enumerate(read_idx_pair(data, "test")[0]):
        Image.fromarray(image[0].numpy()).save(directory / "images" / f"{number:03d}.png")
    Starter(data, directory).complete(*IDX)
    return directory


@pytest.fixture(scope="module")
def colors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on an image folder."""
    directory = tmp_path_factory.mktemp("colors")
    Starter(make_folder(directory / "data"), directory).complete(*FOLDER)
    return directory


def result(directory: Path) -> dict[str, Any]:
    return dict(json.loads((directory / "run" / "final" / "result.json").read_text()))


@pytest.mark.parametrize("kind", ["run", "onnx"])
def test_a_model_predicts_as_in_its_test(digits: Path, tmp_path: Path, ask: Ask, kind: str) -> None:
    model = digits / "run"
    if kind in FORMATS:
        model = tmp_path / f"model{FORMATS[kind].suffix}"
        code, out, _ = ask(digits / "run", f"--format={kind}", f"--output={model}", program=export.main)
        assert code == 0
        assert "input uint8 ['n', 1, 12, 12]; on 64 random images its probabilities differ" in out
    code, out, err = ask(model, digits / "images", "--json", "--top=5")
    predictions, labels = documented("predict", code, out, err), read_idx_pair(digits / "data", "test")[1].tolist()
    assert (code, err, len(predictions)) == (0, "", 101)
    assert [each["path"] for each in predictions] == [str(path) for path in sorted((digits / "images").iterdir())]
    tested = result(digits)
    assert 0.2 < tested["test_accuracy"] < 1, "an eighth would be chance"
    pairs = list(zip(predictions, labels, strict=True))
    right = sum(each["class"] == str(label) for each, label in pairs)
    assert right == tested["test_correct"]
    five = sum(str(label) in [one["class"] for one in each["top"]] for each, label in pairs)
    assert five / 101 == tested["test_top5_accuracy"]
    assert right < five < 101


@pytest.mark.parametrize("kind", ["final", "torch"])
def test_photographs_are_cropped_as_in_the_evaluation(colors: Path, tmp_path: Path, ask: Ask, kind: str) -> None:
    model = colors / "run" / "final"
    if kind == "torch":
        model = tmp_path / "model.pt2"
        assert ask(colors / "run", f"--output={model}", program=export.main)[0] == 0
    code, out, _ = ask(model, colors / "data" / "test", "--csv", "--top=2")
    predictions = list(csv.DictReader(io.StringIO(out)))
    assert (code, len(predictions)) == (0, 27)
    right = sum(each["class"] == Path(each["path"]).parent.name for each in predictions)
    assert right == result(colors)["test_correct"]
    assert predictions[0].keys() == {"path", "class", "probability", "class_2", "probability_2", "error"}
    with (colors / "run" / "final" / "confusion.csv").open(newline="") as file:
        evaluated = {row.pop("true class"): row for row in csv.DictReader(file)}
    card = read_card((colors / "run" / "final" / "model.json").read_text(), "model.json")
    assert (card.size, card.image_shape, card.crop_pct, card.interpolation) == (24, (3, 24, 24), 24 / 28, "bicubic")
    assert result(colors)["input"]["size"] == 24
    counts = Counter((Path(each["path"]).parent.name, each["class"]) for each in predictions)
    assert counts == {(true, taken): int(n) for true, row in evaluated.items() for taken, n in row.items() if n != "0"}


def test_an_image_of_another_size_or_mode_is_converted(digits: Path, tmp_path: Path, ask: Ask) -> None:
    original = Image.open(digits / "images" / "000.png")
    wide = Image.new("RGB", (30, 12), "white")
    wide.paste(original.convert("RGB"), (9, 0))
    wide.save(tmp_path / "wide.png")
    wide.resize((75, 30)).save(tmp_path / "large.png")
    _, out, _ = ask(digits / "run", digits / "images" / "000.png", *sorted(tmp_path.glob("*.png")), "--json", "--top=8")
    original_top, large, wide_top = (each["top"] for each in json.loads(out))
    assert wide_top == original_top
    assert len(large) == 8


def test_file_may_have_any_name(colors: Path, tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "=1+1,\x1b[2J.jpg"
    shutil.copy(colors / "data" / "test" / "red" / "0.jpg", tmp_path / name)
    monkeypatch.chdir(tmp_path)
    _, out, _ = ask(colors / "run", name, "--csv")
    [row] = csv.DictReader(io.StringIO(out))
    assert csv_text(row["path"]) == name
    assert row["path"].startswith("'"), "no formula"
    code, out, err = ask(colors / "run", name)
    assert code == 0
    assert r"=1+1,\x1b[2J.jpg" in out
    assert "\x1b" not in out + err


ODD_NAMES = (
    *(b"lat\xe9", b"\xff", b"new\nline", b"tab\t", b"\x1b[31m"),
    *(b'quo"te', b"com,ma", b"=1+1", b"NA", b"\xd7\xa9\xe2\x80\x8f"),
)


def test_classes_may_have_any_name(start: Starter, tmp_path: Path, ask: Ask) -> None:
    start.data = make_folder(tmp_path / "data", per_class=2)
    for part in ("train", "val", "test"):
        for name in ODD_NAMES:
            shutil.copytree(start.data / part / "red", start.data / part / os.fsdecode(name))
        (start.data / part / "red" / os.fsdecode(b"\xe9\n.jpg")).write_bytes(b"corrupt")
    run = start.complete("--epochs=1", "--batch-size=9", "--image-size=16").run_dir
    names = sorted([*(os.fsencode(name) for name in ("blue sky", "green", "red")), *ODD_NAMES], key=os.fsdecode)
    classes = [name.decode(errors="backslashreplace") for name in names]
    card = json.loads((run / "final" / "result.json").read_bytes())
    assert (card["classes"], card["corrupt_images"]) == (classes, [f"{start.data}/train/red/\\xe9\n.jpg"])
    for table, column in (("classes.csv", "class"), ("confusion.csv", "true class")):
        with (run / "final" / table).open(newline="", encoding="utf-8") as file:
            assert [csv_text(row[column]) for row in csv.DictReader(file)] == classes
    model = tmp_path / "model.pt2"
    assert ask(run, f"--output={model}", program=export.main)[0] == 0
    for flag in ("--csv", "--json"):
        predictions = [ask(subject, start.data / "test", flag) for subject in (run, model)]
        assert {code for code, _, _ in predictions} == {1}, "an image is corrupt"
        assert predictions[0] == predictions[1]
        assert predictions[0][1].encode()


def test_unreadable_images_are_reported_and_the_others_predicted(colors: Path, tmp_path: Path, ask: Ask) -> None:
    torn, missing = tmp_path / "torn.jpg", tmp_path / "missing.jpg"
    whole = colors / "data" / "test" / "red" / "0.jpg"
    torn.write_bytes(whole.read_bytes()[:500])
    code, out, err = ask(colors / "run", torn, whole, missing)
    assert code == 1
    assert "red" in out, "a long path is wrapped"
    assert f"warning: {torn} cannot be read: it is not an image, or it is damaged\n" in err
    assert f"warning: {missing} cannot be read: No such file or directory\n" in err
    code, out, err = ask(colors / "run", torn, whole, "--json")
    predictions = documented("predict", code, out, err)
    assert [("error" in each, "class" in each) for each in predictions] == [(True, False), (False, True)]
    code, out, _ = ask(colors / "run", torn, whole, "--csv", "--top=2")
    assert [row["error"] for row in csv.DictReader(io.StringIO(out))] == ["it is not an image, or it is damaged", ""]
    assert ask(colors / "run", torn)[:2] == (1, "")
    mistake = documented("predict", *ask(colors / "run", torn, "--json", "--csv"))
    assert mistake["error"] == "--json and --csv exclude each other: use one of them"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}"], "there are no images: name files or directories after the model"),
        (["{run}", "{empty}"], "there are no images in {empty}: give files, or a directory with some"),
        (
            ["{empty}", "x.png"],
            "there is no model in {empty}: give a run that has validated or is complete, its final/",
        ),
        (["{torn}", "x.png"], "{torn} cannot be loaded ("),
    ],
)
def test_a_mistake_is_reported_in_one_line(
    digits: Path, tmp_path: Path, ask: Ask, arguments: list[str], message: str
) -> None:
    places = {"run": digits / "run", "empty": tmp_path / "empty", "torn": tmp_path / "torn.pt2"}
    places["empty"].mkdir()
    places["torn"].write_bytes(b"PK")
    code, out, err = ask(*(argument.format(**places) for argument in arguments))
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message.format(**places)}")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--format=onyx", "--output={there}/m.onnx"], "--format is 'onyx': use one of 'torch', 'onnx'"),
        (["--output={there}/m.onnx"], "--output is {there}/m.onnx: use a name that ends with .pt2"),
        (
            ["--output={there}/none/m.pt2"],
            "--output is {there}/none/m.pt2, but {there}/none is not a directory: create it",
        ),
    ],
)
def test_an_export_refuses_what_cannot_work(
    colors: Path, tmp_path: Path, ask: Ask, flags: list[str], message: str
) -> None:
    code, _, err = ask(colors / "run", *(each.format(there=tmp_path) for each in flags), program=export.main)
    assert code == 2
    assert err.startswith(f"error: {message.format(there=tmp_path)}")
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_computes_something_else_is_not_written(
    colors: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = export.ExportOptions(model=str(colors / "run"), output=tmp_path / "model.pt2")
    wrong = load_classifier(colors / "run" / "best")
    wrong.mean += 0.2
    kind = FORMATS["torch"]
    monkeypatch.setitem(FORMATS, "torch", replace(kind, serialize=lambda _: kind.serialize(wrong)))
    with pytest.raises(
        TorchrelayError, match="nothing was written: on 64 random images the probabilities of the exported model differ"
    ):
        export.export(arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_reported_with_what_to_type() -> None:
    kind = FORMATS["onnx"]
    lacking = Format(**{**vars(kind), "packages": ("onnx", "onnx_of_tomorrow")})
    with pytest.raises(UserError, match=r"onnx files need onnx_of_tomorrow: .*pip install .*onnx onnx_of_tomorrow"):
        require_packages(lacking)


def test_a_damaged_model_is_refused(colors: Path, tmp_path: Path) -> None:
    for name, content, message in (
        ("model.json", b"{}", "model.json is damaged or of another version"),
        ("model.safetensors", b"x" * 100, "model.safetensors cannot be loaded"),
    ):
        copy = Path(shutil.copytree(colors / "run" / "final", tmp_path / name))
        (copy / name).write_bytes(content)
        with pytest.raises(UserError, match=message):
            load_classifier(copy)

"""A trained run answers for new images as it did in its evaluation, and turns scores into verdicts."""

import csv
import io
import itertools
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load as load_tensors

import foogd
from foogd import FOOGD, Config, FedAvg, InputError
from foogd.cli import main
from foogd.methods import PROFILES, method_fields, method_names
from foogd.metrics import threshold_at_tpr
from foogd.presets.loader import REMOVED, read_run_config
from foogd.reports.collection import read_record
from foogd.runs import answers
from foogd.runs.federation import make_federation
from foogd.runs.files import read_rows
from foogd.runs.model_file import settings_digest
from foogd.runs.predictions import read_samples
from foogd.runs.run import Run

SETTINGS = (
    "rounds=1", "clients=3", "corruptions=[]", "calibration=0.1", "participation=1.0", "severities=[1]", "min_size=20"
)  # fmt: skip
SAVED = ("msp", "energy", "score_norm", "knn", "mahalanobis", "vim", "span", "score_span", "score_span_all")


def start(folder, method, *more):
    words = ["foogd", "run", "demo", "--method", method, "--out", str(folder)]
    for item in (*SETTINGS, *more):
        words += ["--set", item]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", words)
        main()
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    detectors = f"detectors={','.join(SAVED)}"
    return start(place / "run", "fedrod+foogd", detectors, "lambda_m=0.0")


@pytest.fixture
def foogd_command(monkeypatch, capsys):
    def command(*words):
        monkeypatch.setattr("sys.argv", ["foogd", *map(str, words)])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code
        found = capsys.readouterr()
        return code, found.out, found.err

    return command


def federation_of(folder):
    return make_federation(read_run_config(folder / "config.toml")[0])


@pytest.mark.parametrize("detector", SAVED)
def test_a_client_of_the_loaded_model_answers_as_in_the_evaluation(trained, detector):
    model, federation, rows = foogd.load(trained), federation_of(trained), read_rows(trained)
    inside = federation.tests[0]
    out = next(test for test in federation.tests if test.split == "out")
    for client in range(3):
        own = model.predict(inside.store.images[inside.indices[client]], client=client, detector=detector)
        wanted = {(r.metric, r.detector): r.value for r in rows if r.client == client and r.dataset == inside.name}
        right = (own.classes == inside.store.labels[inside.indices[client]]).double().mean()
        assert float(right) == pytest.approx(wanted["accuracy", None])
        assert float(own.out.double().mean()) == pytest.approx(wanted["rejected_calibrated", detector], abs=1e-9)
        other = model.predict(out.store.images, client=client, detector=detector)
        area = foogd.metrics.auroc(own.score, other.score)
        found = next(
            r.value for r in rows
            if (r.client, r.detector, r.metric, r.dataset) == (client, detector, "auroc", out.name)
        )  # fmt: skip
        assert area == pytest.approx(found, abs=1e-6)


def test_nobody_in_particular_gets_the_generic_model(trained):
    model, federation = foogd.load(trained), federation_of(trained)
    inside = federation.tests[0]
    found = model.predict(inside.store.images, detector="energy")
    rows = read_rows(trained)
    [generic] = [r.value for r in rows if r.metric == "accuracy_generic" and r.split == "in"]
    order = torch.cat([inside.indices[client] for client in range(3)])
    right = (found.classes == inside.store.labels)[order].double().mean()
    assert float(right) == pytest.approx(generic)
    assert not torch.equal(found.score, model.predict(inside.store.images, detector="energy", client=0).score)


def test_a_threshold_accepts_the_share_that_was_asked_for(trained):
    model, federation = foogd.load(trained), federation_of(trained)
    aside = torch.cat(federation.calibration_indices)
    for tpr in (0.5, 0.8, 0.95, 1.0):
        found = model.predict(federation.train.images[aside], tpr=tpr)
        assert found.threshold == pytest.approx(threshold_at_tpr(found.score, tpr), rel=1e-5)
        assert float((~found.out).double().mean()) == pytest.approx(tpr, abs=1 / len(aside))
    for client, own in enumerate(federation.calibration_indices):
        found = model.predict(federation.train.images[own], client=client, detector="msp", tpr=0.8)
        assert abs(float((~found.out).double().mean()) - 0.8) <= 1 / len(own)
    assert model.threshold(tpr=0.99) > model.threshold(tpr=0.5)


def test_images_that_were_set_aside_train_nothing(trained):
    federation = federation_of(trained)
    saved = json.loads((trained / "partition.json").read_text())
    for client, (own, aside) in enumerate(zip(federation.train_indices, federation.calibration_indices, strict=True)):
        assert not set(own.tolist()) & set(aside.tolist())
        assert len(aside) == round(0.1 * (len(own) + len(aside)))
        assert saved["calibration_indices"][client] == aside.tolist()
        assert saved["indices"][client] == own.tolist()
    assert (
        f"{sum(map(len, federation.calibration_indices))} training images were set aside"
        in (trained / "summary.md").read_text()
    )


def test_one_call_is_the_verdict_of_equation_9(trained):
    model, federation = foogd.load(trained), federation_of(trained)
    images = federation.tests[-1].store.images[:40]
    found = model.predict(images)
    assert torch.equal(model.is_out(images), found.score > found.threshold)
    assert found.detector == "score_span_all"
    assert [row["verdict"] for row in found.rows()] == ["OUT" if out else "IN" for out in found.out]


@pytest.mark.parametrize("client", [None, 1])
def test_a_verdict_rests_on_what_everyone_has_unless_one_chooses(trained, client):
    model, image = foogd.load(trained), federation_of(trained).tests[0].store.images[:1]
    for wanted in ("score_span_all", "score_norm", "span", "energy", "msp"):
        found = model.predict(image, client=client)
        assert found.detector == wanted
        assert found.threshold == model.threshold(wanted, client=client)
        del model._of[client].detectors[wanted]  # as if the run had not named it


def test_images_come_as_arrays_tensors_and_files_of_any_size(trained, tmp_path):
    model, federation = foogd.load(trained), federation_of(trained)
    stack = federation.tests[0].store.images[:3]
    wanted = model.predict(stack)
    assert torch.equal(model.predict(stack.numpy()[..., 0]).score, wanted.score)
    assert torch.equal(model.predict(list(stack)).score, wanted.score)
    files = []
    for number, image in enumerate(stack):
        files.append(tmp_path / f"{number}.png")
        Image.fromarray(image[..., 0].numpy()).save(files[-1])
    assert torch.equal(model.predict(files).score, wanted.score)
    colour = np.repeat(np.repeat(stack.numpy(), 3, axis=3), 2, axis=1)
    assert len(model.predict(colour)) == 3
    Image.fromarray(stack[0, :, :, 0].numpy()).resize((90, 61)).save(tmp_path / "large.jpg")
    assert len(model.predict(tmp_path / "large.jpg")) == 1
    with Image.open(tmp_path / "large.jpg") as picture:
        assert len(model.predict(picture.convert("RGB"))) == 1


def picture_of(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)


@pytest.mark.parametrize("size", [(90, 40), (31, 64), (28, 50), (20, 9)])
def test_a_picture_is_judged_alike_as_file_array_and_picture(trained, tmp_path, size):
    model, pixels = foogd.load(trained), picture_of(size)
    Image.fromarray(pixels).save(tmp_path / "file.png")
    wanted = model.predict(tmp_path / "file.png").score
    with Image.open(tmp_path / "file.png") as picture:
        assert torch.equal(model.predict(picture).score, wanted)
        assert torch.equal(model.predict([picture]).score, wanted)
    assert torch.equal(model.predict(pixels[None]).score, wanted)
    assert torch.equal(model.predict([torch.as_tensor(pixels)]).score, wanted)
    assert torch.equal(model.predict(pixels[None, :, ::-1][:, :, ::-1]).score, wanted)
    grey = Image.fromarray(pixels).convert("L")
    grey.save(tmp_path / "grey.png")
    wanted = model.predict(tmp_path / "grey.png").score
    assert torch.equal(model.predict(np.asarray(grey)[None]).score, wanted)
    assert torch.equal(model.predict(grey).score, wanted)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB"])
@pytest.mark.filterwarnings("error")
def test_pictures_of_every_mode_are_judged_as_their_file(trained, tmp_path, mode):
    model = foogd.load(trained)
    picture = Image.fromarray(picture_of((40, 33)))
    if mode in ("LA", "RGBA", "PA"):
        picture.putalpha(Image.fromarray(picture_of((40, 33), 1)[..., 0]))
    picture = picture.convert("P").convert("PA") if mode == "PA" else picture.convert(mode)
    name = tmp_path / ("file.tif" if mode in ("CMYK", "YCbCr", "LAB") else "file.png")
    (picture.convert("RGB") if mode in ("HSV", "PA") else picture).save(name)
    found = model.predict(picture)
    assert torch.equal(found.score, model.predict(name).score)
    if mode == "P":  # by its colours, not by their numbers
        assert torch.equal(found.score, model.predict(picture.convert("RGB")).score)


@pytest.mark.filterwarnings("error")
def test_arrays_that_cannot_be_written_to_are_taken_without_a_warning(trained):
    model, pixels = foogd.load(trained), picture_of((28, 28))[None]
    pixels.flags.writeable = False
    torch.set_warn_always(True)  # else only the first such array of a process is warned about
    try:
        assert len(model.predict(pixels)) == len(model.predict(Image.fromarray(pixels[0]))) == 1
    finally:
        torch.set_warn_always(False)


def test_pictures_are_judged_upright(trained, tmp_path):
    model, pixels = foogd.load(trained), picture_of((40, 33))
    remark = Image.Exif()
    remark[0x0112] = 6
    Image.fromarray(pixels).save(tmp_path / "turned.png", exif=remark)
    wanted = model.predict(np.rot90(pixels, -1)[None]).score
    assert torch.equal(model.predict(tmp_path / "turned.png").score, wanted)
    with Image.open(tmp_path / "turned.png") as picture:
        assert torch.equal(model.predict(picture).score, wanted)


def test_pictures_with_more_than_8_bits_are_refused(trained):
    deep = Image.fromarray(np.full((30, 30), 40_000, dtype=np.uint16))
    with pytest.raises(InputError, match="a picture cannot be used: its pixels have the mode I;16"):
        foogd.load(trained).predict(deep)


def test_wrong_questions_are_answered_in_one_sentence(trained, tmp_path):
    model = foogd.load(trained)
    image = np.zeros((1, 28, 28), dtype=np.uint8)
    with pytest.raises(InputError, match="clients 0 to 2"):
        model.predict(image, client=3)
    with pytest.raises(InputError, match=r"'react' is not possible without a client: .*--detector react adds it.*msp"):
        model.predict(image, detector="react")
    with pytest.raises(InputError, match=r"'react' is not possible as client 1: .*--detector react adds it.*knn"):
        model.predict(image, detector="react", client=1)
    with pytest.raises(InputError, match=r"has no detector 'nothing'; possible are msp"):
        model.predict(image, detector="nothing")
    with pytest.raises(InputError, match=r"'knn' is not possible without a client: .* client from 0 to 2; .* msp"):
        model.predict(image, detector="knn")
    with pytest.raises(InputError, match="float32"):
        model.predict(image.astype(np.float32))
    with pytest.raises(InputError, match="no images"):
        model.predict([])
    with pytest.raises(InputError, match="NoneType"):
        model.predict(None)
    with pytest.raises(InputError, match="an axis for N"):
        model.predict(np.zeros((28, 28, 3), dtype=np.uint8))
    with pytest.raises(InputError, match="clients 0 to 2"):
        model.threshold(client=99)
    with pytest.raises(InputError, match="device = 'banana'"):
        foogd.load(trained, device="banana")
    (tmp_path / "broken.png").write_bytes(b"nothing")
    with pytest.raises(InputError, match=r"broken.png cannot be used"):
        model.predict(tmp_path / "broken.png")
    with pytest.raises(InputError, match="not a run folder"):
        foogd.load(tmp_path)


@pytest.mark.parametrize("client", [[1], True, 1.0, "1", -1, 3, {}, np.array([1]), float("nan")])
def test_only_numbers_of_clients_are_clients(trained, client):
    model, image = foogd.load(trained), np.zeros((1, 28, 28), dtype=np.uint8)
    for ask in (lambda: model.predict(image, client=client), lambda: model.threshold(client=client)):
        with pytest.raises(InputError, match="this run has the clients 0 to 2"):
            ask()
    found = model.predict(image, client=np.int64(1))
    assert torch.equal(found.score, model.predict(image, client=1).score)
    assert type(found.client) is int


@pytest.mark.parametrize("tpr", ["0.9", None, True, 0, 0.0, -0.5, 1.01, float("nan"), float("inf"), [0.9], 0.9j])
def test_only_shares_are_shares(trained, tpr):
    model, image = foogd.load(trained), np.zeros((1, 28, 28), dtype=np.uint8)
    for ask in (model.predict, model.is_out):
        with pytest.raises(InputError, match="above 0 and at most 1"):
            ask(image, tpr=tpr)
    with pytest.raises(InputError, match="above 0 and at most 1"):
        model.threshold(tpr=tpr)
    assert model.threshold(tpr=1) == model.threshold(tpr=np.float32(1))


@pytest.mark.parametrize("detector", [["energy"], 1, b"energy", {"energy"}])
def test_only_names_are_detectors(trained, detector):
    with pytest.raises(InputError, match="a name is needed, one of msp, energy"):
        foogd.load(trained).predict(np.zeros((1, 28, 28), dtype=np.uint8), detector=detector)


@pytest.mark.parametrize("folder", [None, 3, ["runs/a"], b"runs/a"])
def test_only_paths_are_run_folders(folder):
    with pytest.raises(InputError, match="a path is needed"):
        foogd.load(folder)


def edited(trained, tmp_path, **changes):
    """A copy of a run whose model.json somebody has changed."""
    copy = tmp_path / "copy"
    if not copy.exists():
        shutil.copytree(trained, copy)
    about = json.loads((trained / "model" / "model.json").read_text())
    (copy / "model" / "model.json").write_text(json.dumps(about | changes))
    return copy


WRONG = ("x", None, True, -1, 1.5, [], {}, ["x", 1], [1, 2, 3, 4], [[1]], [None], float("nan"), [float("nan")], "\0")


@pytest.mark.parametrize("key", ["round", "clients", "shape", "classes", "mean", "std", "detectors", "file", "sha256"])
def test_a_description_that_was_changed_ends_in_one_sentence(trained, tmp_path, foogd_command, key):
    Image.new("L", (28, 28)).save(tmp_path / "black.png")
    for value in WRONG:
        if key == "detectors" and value == []:
            continue  # a model without detectors is whole, and says so when it is asked
        with pytest.raises(InputError, match=r"model\.json|damaged"):
            foogd.load(edited(trained, tmp_path, **{key: value}))
    code, _, err = foogd_command("predict", tmp_path / "copy", tmp_path / "black.png")
    assert code == 2
    assert err.count("\n") == 1
    assert "damaged" in err or "cannot be read" in err


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"clients": 9}, "clients is 9, and the model holds 3"),
        ({"clients": 2}, "clients is 2, and the model holds 3"),
        ({"std": [1.0, 1.0, 1.0, 1.0]}, "a number above 0 for each channel is needed"),
        ({"std": [0.0]}, "a number above 0 for each channel is needed"),
        ({"classes": ["one"]}, "classes has 1 names, and the model 8"),
        ({"detectors": ["msp", "energy"]}, "detectors names 2, and the model has more"),
        ({"shape": [3, 28, 28], "mean": [0.5] * 3, "std": [0.5] * 3}, "does not fit its configuration"),
    ],
)
def test_a_description_of_another_model_is_found(trained, tmp_path, changes, sentence):
    with pytest.raises(InputError, match=sentence):
        foogd.load(edited(trained, tmp_path, **changes))


def test_a_detector_that_was_not_fitted_spoils_only_itself(trained, tmp_path):
    names = json.loads((trained / "model" / "model.json").read_text())["detectors"]
    names[names.index("energy")] = "gaussian"
    model, image = foogd.load(edited(trained, tmp_path, detectors=names)), np.zeros((1, 28, 28), dtype=np.uint8)
    assert len(model.predict(image)) == 1
    with pytest.raises(InputError, match="not fitted for gaussian"):
        model.predict(image, detector="gaussian")


def test_a_damaged_or_missing_model_is_named(trained, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    [file] = (copy / "model").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(InputError, match="checksum"):
        foogd.load(copy)
    file.unlink()
    with pytest.raises(InputError, match="cannot be read"):
        foogd.load(copy)
    (copy / "model" / "model.json").write_text("{}")
    with pytest.raises(InputError, match="it is no object with"):
        foogd.load(copy)
    shutil.rmtree(copy / "model")
    with pytest.raises(InputError, match="no model yet"):
        foogd.load(copy)


def test_without_images_set_aside_there_is_a_score_but_no_verdict(tmp_path, foogd_command):
    folder = start(tmp_path / "plain", "fedavg", "calibration=0.0", "detectors=msp,energy")
    model = foogd.load(folder)
    image = np.zeros((1, 28, 28), dtype=np.uint8)
    assert not model.is_calibrated
    assert model.predict(image).out is None
    assert model.predict(image).detector == "energy"
    with pytest.raises(InputError, match=r"calibration=0\.05"):
        model.is_out(image)
    Image.fromarray(image[0]).save(tmp_path / "black.png")
    code, out, err = foogd_command("predict", folder, tmp_path / "black.png")
    assert code == 0
    assert "probability" in out
    assert "no verdict" in err


def test_the_command_prints_a_table_json_and_csv(trained, tmp_path, foogd_command):
    stack = federation_of(trained).tests[0].store.images[:2, :, :, 0].numpy()
    folder = tmp_path / "images"
    folder.mkdir()
    for number, image in enumerate(stack):
        Image.fromarray(image).save(folder / f"{number}.png")
    wanted = foogd.load(trained).predict(sorted(folder.iterdir()), client=1)
    code, out, _ = foogd_command("predict", trained, folder, "--client", 1, "--format", "json")
    found = json.loads(out)
    assert (code, found["detector"], found["tpr"]) == (0, "score_span_all", 0.95)
    assert [row["score"] for row in found["images"]] == wanted.score.tolist()
    assert [row["file"] for row in found["images"]] == [str(folder / "0.png"), str(folder / "1.png")]
    _, out, _ = foogd_command("predict", trained, folder, "--client", 1, "--format", "csv")
    assert [row["label"] for row in csv.DictReader(io.StringIO(out))] == list(wanted.labels)
    _, out, _ = foogd_command("predict", trained, folder / "0.png")
    assert "verdict" in out
    assert wanted.labels[0] in foogd.load(trained).classes
    for words, sentence in (
        (("--tpr", "1.5"), "--tpr '1.5' is not allowed"),
        (("--format", "xml"), "table, json or csv"),
        (("--client", "x"), "--client 'x' is not allowed"),
        (("--detector", "nothing"), "has no detector 'nothing'"),
    ):
        code, _, err = foogd_command("predict", trained, folder / "0.png", *words)
        assert code == 2
        assert sentence in err
    code, _, err = foogd_command("predict", trained, tmp_path / "gone.png")
    assert code == 2
    assert "gone.png does not exist" in err


def test_the_command_says_how_many_images_a_threshold_rests_on(trained, tmp_path, foogd_command):
    Image.new("L", (28, 28)).save(tmp_path / "black.png")
    counts = [len(own) for own in federation_of(trained).calibration_indices]
    model = foogd.load(trained)
    assert model.predict(tmp_path / "black.png", client=2).calibrated == counts[2]
    assert model.predict(tmp_path / "black.png").calibrated == sum(counts)

    def ask(*words):
        code, out, err = foogd_command("predict", trained, tmp_path / "black.png", *words)
        assert code == 0
        return out, err

    for client, wanted in ((None, sum(counts)), (1, counts[1])):
        words = () if client is None else ("--client", client)
        whose = "all clients" if client is None else "client 1"
        out, _ = ask(*words)
        assert f"{wanted} images of {whose}" in " ".join(out.split())
        found = json.loads(ask(*words, "--format", "json")[0])
        assert (found["client"], found["calibrated"], found["calibrated_by"]) == (client, wanted, client)
        assert [row["calibrated"] for row in csv.DictReader(io.StringIO(ask(*words, "--format", "csv")[0]))] == [
            str(wanted)
        ]
        # Just enough images for a share, and one too few.
        enough, too_few = (1 - 1 / count for count in (wanted, wanted + 1))
        assert ask(*words, "--tpr", int(enough * 1000) / 1000)[1] == ""
        _, err = ask(*words, "--tpr", f"{too_few:.6f}")
        assert f"rests on {wanted} images of {whose}: --tpr {too_few:.6f} needs at least" in err
        assert err.count("\n") == 1
    assert ask("--tpr", "1")[1] == ""


def test_hidden_files_are_no_images(trained, tmp_path, foogd_command):
    for name in ("a.png", "._a.png", ".hidden/b.png", "deep/c.png"):
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (28, 28)).save(tmp_path / "set" / name)
    (tmp_path / "set" / "._a.png").write_bytes(b"no image")
    _, out, _ = foogd_command("predict", trained, tmp_path / "set", "--format", "json")
    assert [row["file"] for row in json.loads(out)["images"]] == [
        str(tmp_path / "set" / name) for name in ("a.png", "deep/c.png")
    ]


def test_images_that_cannot_be_read_are_skipped_where_that_is_asked_for(trained, tmp_path, foogd_command):
    folder = tmp_path / "set"
    folder.mkdir()
    for name in ("a.png", "c.png"):
        Image.new("L", (28, 28), 9).save(folder / name)
    (folder / "b.png").write_bytes(b"no image")
    code, out, err = foogd_command("predict", trained, folder)
    assert (code, out) == (2, "")
    assert "b.png cannot be used" in err
    gone = tmp_path / "gone.png"
    words = ("--on-bad", "skip", "--format", "json", "--tpr", 0.5)
    code, out, err = foogd_command("predict", trained, folder, gone, *words)
    assert code == 0
    assert [row["file"] for row in json.loads(out)["images"]] == [str(folder / "a.png"), str(folder / "c.png")]
    assert [line.split(":")[0] for line in err.splitlines()] == ["foogd", "foogd"]
    assert "b.png cannot be used: it is not an image of a known format: PNG, JPEG, " in err
    assert "TIFF; it is left out" in err
    assert "gone.png does not exist" in err
    code, out, err = foogd_command("predict", trained, folder / "b.png", "--on-bad", "skip")
    assert (code, out) == (2, "")
    assert "none of the images can be used" in err
    code, _, err = foogd_command("predict", trained, folder, "--on-bad", "ignore")
    assert code == 2
    assert "--on-bad 'ignore' is not allowed: use error or skip" in err


@pytest.mark.parametrize("method", ["fedt3a", "fedthe", "fedicon", "foster", "fedbn"])
def test_methods_with_private_or_test_time_parts_can_be_loaded(method, tmp_path):
    folder = start(tmp_path / "run", method, "detectors=msp,energy")
    model, federation = foogd.load(folder), federation_of(folder)
    inside, rows = federation.tests[0], read_rows(folder)
    for client in range(3):
        own = inside.indices[client]
        found = model.predict(inside.store.images[own], client=client)
        [wanted] = [r.value for r in rows if (r.client, r.metric, r.split) == (client, "accuracy", "in")]
        assert float((found.classes == inside.store.labels[own]).double().mean()) == pytest.approx(wanted, abs=0.02)
    assert len(model.predict(inside.store.images[:8])) == 8


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    """A run before and after it was evaluated with other detectors, and the rows of that evaluation."""
    place = tmp_path_factory.mktemp("grown")
    before = start(place / "before", "fedrod+foogd", "detectors=energy,score_norm")
    after = place / "after"
    shutil.copytree(before, after)
    rows = Run.open(after, read_run_config).evaluate(["knn", "energy", "gaussian"])
    return before, after, rows


def read_model(folder):
    about = json.loads((folder / "model" / "model.json").read_text())
    return about, load_tensors((folder / "model" / about["file"]).read_bytes())


def test_an_evaluation_adds_its_detectors_to_the_model(grown):
    before, after, rows = grown
    (about, tensors), (old_about, old_tensors) = read_model(after), read_model(before)
    assert about["detectors"] == ["energy", "score_norm", "knn", "gaussian"]
    changed = {"detectors", "file", "sha256"}
    assert {key: about[key] for key in about.keys() - changed} == {
        key: old_about[key] for key in old_about.keys() - changed
    }
    assert all(torch.equal(tensors[name], value) for name, value in old_tensors.items())
    assert len(list((after / "model").iterdir())) == 2
    model, older, federation = foogd.load(after), foogd.load(before), federation_of(after)
    inside, out = federation.tests[0], next(test for test in federation.tests if test.split == "out")
    samples = read_samples(after)
    for client in (*range(3), None):
        for name in ("energy", "score_norm"):
            found = older.predict(out.store.images[:20], client=client, detector=name)
            again = model.predict(out.store.images[:20], client=client, detector=name)
            assert torch.equal(found.score, again.score)
            assert found.threshold == again.threshold
    for name in ("knn", "gaussian"):
        for client in range(3):
            own = model.predict(inside.store.images[inside.indices[client]], client=client, detector=name)
            [wanted] = [
                row.value for row in rows
                if (row.client, row.detector, row.metric, row.split) == (client, name, "rejected_calibrated", "in")
            ]  # fmt: skip
            assert float(own.out.double().mean()) == pytest.approx(wanted, abs=1e-9)
            kept = next(one for one in samples.sets if one.split == "in")
            mine = kept.client == client
            own = model.predict(inside.store.images[kept.index[mine]], client=client, detector=name)
            assert torch.allclose(kept.scores[name][mine].double(), own.score, rtol=1e-5, atol=1e-6)


def test_an_evaluation_that_adds_nothing_leaves_the_model_alone(grown, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(grown[1], copy)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (copy / "model").iterdir()}
    for detectors in (["gaussian", "knn"], []):
        Run.open(copy, read_run_config).evaluate(detectors)
        assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (copy / "model").iterdir()} == before


def test_a_kill_while_a_detector_is_added_leaves_the_old_model_or_the_new(grown, tmp_path, monkeypatch):
    before, _, _ = grown
    write, unlink = answers.write_atomic, Path.unlink
    for moment in range(3):
        copy = tmp_path / str(moment)
        shutil.copytree(before, copy)
        done = []

        def killed(path, data, done=done, moment=moment):
            if path.parent.name == "model":
                if len(done) == moment:
                    raise KeyboardInterrupt
                done.append(path)
            write(path, data)

        def stopped(path, **words):
            if path.name.startswith("model-"):
                raise KeyboardInterrupt
            unlink(path, **words)

        with monkeypatch.context() as patch:
            patch.setattr(answers, "write_atomic", killed)
            if moment == 2:  # both files are there, and the older one still is
                patch.setattr(Path, "unlink", stopped)
            with pytest.raises(KeyboardInterrupt):
                Run.open(copy, read_run_config).evaluate(["knn"])
        assert foogd.load(copy).detectors == ["energy", "score_norm", *(["knn"] if moment == 2 else [])]


def test_a_model_that_lacks_what_was_evaluated_says_how_to_get_it(grown, tmp_path, foogd_command):
    before, after, _ = grown
    copy = tmp_path / "copy"
    shutil.copytree(after, copy)
    shutil.rmtree(copy / "model")
    shutil.copytree(before / "model", copy / "model")
    Image.new("L", (28, 28)).save(tmp_path / "black.png")
    words = ("predict", copy, tmp_path / "black.png", "--client", 1, "--detector", "knn")
    code, _, err = foogd_command(*words)
    assert code == 2
    assert f"it was evaluated, but the model was saved without it; foogd evaluate {copy} --detector knn adds it" in err
    assert foogd_command("evaluate", copy, "--detector", "knn")[0] == 0
    assert foogd_command(*words)[0] == 0


OWN = """
from dataclasses import dataclass
from typing import final
from torch.nn.functional import cross_entropy
from foogd import Method

@final
@dataclass(frozen=True)
class Own(Method):
    share: float = 0.5
    kinds: tuple[str, ...] = ("a", "b")

    def losses(self, nets, batch, ctx):
        return {"model": cross_entropy(nets["head"](batch.features), batch.y)}
"""


def test_a_run_with_settings_that_are_gone_is_read_where_they_had_their_defaults(tmp_path, monkeypatch, foogd_command):
    own, folder = tmp_path / "own.py", tmp_path / "run"
    own.write_text(OWN)
    start(folder, f"{own}:Own", "detectors=msp")
    own.write_text(re.sub(r"    (share|kinds): .*\n", "", OWN))
    for key, value in (("share", 0.5), ("kinds", ["a", "b"])):
        monkeypatch.setitem(REMOVED, key, value)
    Image.new("L", (28, 28)).save(tmp_path / "black.png")
    ways = (
        ("predict", folder, tmp_path / "black.png"),
        ("evaluate", folder, "--detector", "energy"),
        ("run", folder / "config.toml", "--out", folder, "--resume"),
    )
    for words in ways:
        assert foogd_command(*words)[0] == 0
    report = ("report", folder, "--format", "csv", "--out", tmp_path / "table.csv")
    assert foogd_command(*report)[0] == 0
    assert not {"share", "kinds"} & read_record(folder).settings.keys()
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("share = 0.5", "share = 0.25"))
    for words in ways:
        code, _, err = foogd_command(*words)
        assert code == 2
        assert "share = 0.25 is not possible any more: only its default 0.5 remains" in err
    assert foogd_command(*report)[0] == 0  # what it says is what was done
    assert read_record(folder).settings["share"] == 0.25


def test_no_setting_of_today_is_among_those_that_are_gone():
    for name, profile in itertools.product(method_names(), PROFILES):
        assert not REMOVED.keys() & {*method_fields(name, profile), *Config.__dataclass_fields__}


def test_settings_that_were_changed_by_hand_are_noticed(grown, tmp_path, foogd_command):
    copy = tmp_path / "copy"
    shutil.copytree(grown[0], copy)
    config = (copy / "config.toml").read_text()
    Image.new("L", (28, 28)).save(tmp_path / "black.png")
    for key, value in (("sigma", 7.5), ("seed", 3), ("step", 0.125), ("ce_on", '"both"')):
        changed = re.sub(rf"(?m)^{key} = .*$", f"{key} = {value}", config)
        assert changed != config
        (copy / "config.toml").write_text(changed)
        code, _, err = foogd_command("predict", copy, tmp_path / "black.png")
        assert code == 2
        assert "config.toml was changed since the model was saved" in err
    for key, value in (("device", '"auto"'), ("data_root", '"elsewhere"'), ("eval_batch", 7), ("threads", 2),
                       ("detectors", '["msp"]')):  # fmt: skip
        (copy / "config.toml").write_text(re.sub(rf"(?m)^{key} = .*$", f"{key} = {value}", config))
        foogd.load(copy)
    # A model of before there was a digest, and one of a version that had fewer settings.
    about = json.loads((copy / "model" / "model.json").read_text())
    older = {key: value for key, value in about.items() if not key.startswith("settings")}
    (copy / "config.toml").write_text(re.sub(r"(?m)^sigma = .*$", "sigma = 7.5", config))
    (copy / "model" / "model.json").write_text(json.dumps(older))
    foogd.load(copy)
    run = Run.open(copy, read_run_config)
    fewer = settings_digest(run.config, run.method, ["backbone", "method", "lambda_m"])
    (copy / "model" / "model.json").write_text(json.dumps(older | fewer))
    foogd.load(copy)
    for broken in ({"settings": 3}, {"settings": [3]}, {"settings": ["sigma"], "settings_sha256": 3}):
        (copy / "model" / "model.json").write_text(json.dumps(older | broken))
        with pytest.raises(InputError, match=r"config\.toml was changed|digest of the settings is not whole"):
            foogd.load(copy)


def test_settings_mean_the_same_however_they_are_written():
    config = Config(method="fedavg+foogd")
    for one, other in ((FOOGD(FedAvg(), sigma=1), FOOGD(FedAvg(), sigma=1.0)),):
        assert settings_digest(config, one) == settings_digest(config, other)
    moved = [Config(method="fedavg", backbone=f"{place}net.py:tiny") for place in ("", "there/", "/far/away/")]
    assert len({settings_digest(one, FedAvg())["settings_sha256"] for one in moved}) == 1


def test_a_run_that_is_trained_again_replaces_its_model(tmp_path):
    folder = start(tmp_path / "run", "fedavg", "detectors=msp")
    about, tensors = read_model(folder)
    config = (folder / "config.toml").read_text()
    for name in ("checkpoint", "rounds.jsonl", "rows.jsonl", "summary.md"):
        shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()
    (folder / "config.toml").write_text(re.sub(r"(?m)^lr = .*$", "lr = 0.01", config))
    list(Run.open(folder, read_run_config).train())
    assert not torch.equal(read_model(folder)[1]["shared"], tensors["shared"])
    assert read_model(folder)[0]["weights_sha256"] != about["weights_sha256"]


def test_a_resumed_run_has_the_model_too(tmp_path):
    folder = start(tmp_path / "run", "fedavg", "detectors=msp")
    [file] = (folder / "model").glob("*.safetensors")
    wanted = file.read_bytes()
    file.unlink()  # of the two files the larger one: the run is not whole
    list(Run.open(folder, read_run_config).train())
    assert file.read_bytes() == wanted
    assert foogd.load(folder).detectors == ["msp"]


def test_someone_unknown_is_judged_by_thresholds_of_the_generic_model(tmp_path):
    folder = start(tmp_path / "run", "fedthe", "detectors=energy,msp", "calibration=0.2")
    model, federation = foogd.load(folder), federation_of(folder)
    aside = federation.calibration_test
    for detector in ("energy", "msp"):
        # Each client's images are a stream of their own, for the method adapts to a stream.
        scores = torch.cat([model.predict(aside.store.images[own], detector=detector).score for own in aside.indices])
        wanted = threshold_at_tpr(scores)
        assert model.threshold(detector) == pytest.approx(wanted, rel=1e-4)


def test_a_model_whose_only_detector_is_local_says_so(tmp_path):
    folder = start(tmp_path / "run", "fedavg", "detectors=knn")
    model, image = foogd.load(folder), np.zeros((1, 28, 28), dtype=np.uint8)
    assert len(model.predict(image, client=0)) == 1
    with pytest.raises(InputError, match=r"can be used without a client: knn: .* give a client from 0 to 2"):
        model.predict(image)
    with pytest.raises(InputError, match="the method fedavg has no part that it asks for; no other is possible"):
        model.predict(image, detector="score_norm")


def test_a_missing_detector_of_your_own_spoils_only_itself(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def norm(output):\n    return -output.z.norm(dim=1)\n")
    folder = start(tmp_path / "run", "fedavg", f'detectors=["energy", "{file}:norm"]')
    image = np.zeros((1, 28, 28), dtype=np.uint8)
    assert len(foogd.load(folder).predict(image, detector=f"{file}:norm")) == 1
    file.unlink()
    model = foogd.load(folder)
    assert len(model.predict(image)) == 1
    with pytest.raises(InputError, match=r"mine\.py"):
        model.predict(image, detector=f"{file}:norm")

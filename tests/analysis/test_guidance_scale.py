"""The command that measures effective guidance scales, on runs that were trained for it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from analysis_runs import stored_scale, write
from small import small

from analysis.command import main
from analysis.comparison.results import Results
from analysis.figures.effective_scale import effective_scale as draw
from analysis.measurements import guidance_scale_file
from analysis.measurements.guidance_scale import Measurement
from analysis.tables import guidance_scale as guidance_table
from analysis.tables import make
from analysis.tables.table import plain
from experiments import components as build
from experiments.evaluation.trained_model import export
from experiments.training.session import train

LEVELS = (1.5, 9.0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Exported models with random weights, each with other ones."""
    folder, found = tmp_path_factory.mktemp("models"), {}
    made = {"dense": (), "other": ("seed=1",), "routed": ("route=1-2",)}
    made |= {"flow": ("objective=flow",), "blind": ("train.label_drop=0",)}
    for place, (name, more) in enumerate(made.items()):
        config = small(folder, "guidance=none", *more)
        info = build.describe_data(build.make_dataset(config))
        model = build.make_model(config, info)
        torch.manual_seed(place)
        for p in model.parameters():
            p.data.add_(0.05 * torch.randn_like(p))
        found[name] = folder / f"{name}.safetensors"
        export(found[name], model, model.state_dict(), config, 1, info)
    return found


def stored(route: str, seed: int, values: dict[float | None, Any], **more: Any) -> dict[str, Any]:
    """Return what the command stores beside a run: the dense pass at each level."""
    rows = []
    for level, value in values.items():
        row = {"pair": "dense", "level": level, "plain": 1.0, "instrumented": value}
        rows.append({**row, "plain_low": 0.9, "plain_high": 1.1})
    return stored_scale(route, seed, rows, **more)


def test_several_seeds_are_one_row_and_one_line() -> None:
    files = []
    for seed, value in enumerate((1.0, 1.2, None)):
        files.append(stored("2-8", seed, dict.fromkeys((*LEVELS, None), value)))
    (row,) = guidance_table.scale_table(files).rows
    texts = [plain(entry) for entry in row.entries[:4]]
    assert texts == ["dense", "mean", "1.000 \u00b1 0.000 (n=3)", "1.100 \u00b1 1.271 (n=2 of 3)\u2020"]
    plot = draw(files)
    assert plot is not None and plot.png(dpi=40).startswith(b"\x89PNG")
    (ax,) = plot.figure.axes  # no panel of differences without dense runs
    assert list(ax.lines[1].get_xydata()[:, 1]) == pytest.approx([1.1, 1.1])
    assert draw([]) is None


def test_learning_rates_are_told_apart_and_no_seed_counts_twice(tmp_path: Path) -> None:
    for place, rate in enumerate((1e-3, 1e-4)):
        for seed in (0, 1, 2):
            for route in ("none", "2-8"):
                folder = write(tmp_path, route=route, seed=seed, train__lr=rate)
                value = 0.9 + place + (0.01 + seed / 1e3) * (route != "none")
                scales = stored(route, seed, {1.0: value, None: value}, run=folder.name)
                (folder / guidance_scale_file.FILE).write_text(json.dumps(scales))
    results = Results.of(tmp_path)
    files = guidance_table.stored_scales(results)
    rows = guidance_table.scale_table(files).rows
    assert len(rows) == 4 and all(row.entries[3].n == 3 for row in rows)
    plot = draw(files)
    # For each rate the scale and the paired differences.
    assert plot is not None and len(plot.figure.axes) == 4
    titles = {ax.get_title("left").replace("\n", " ") for ax in plot.figure.axes[::2]}
    assert titles == {f"dit-T/1, digits (train.lr={rate}), after 400 steps" for rate in (0.001, 0.0001)}
    bars = plot.figure.axes[1].containers[0]
    assert bars[0].get_ydata() == pytest.approx(0.011, abs=1e-9)


@pytest.fixture(autouse=True)
def current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of exported files are written to the current folder."""
    monkeypatch.chdir(tmp_path)


def rows(run: Path) -> dict[tuple[str, float | None], dict[str, Any]]:
    found = guidance_scale_file.read_scales(run / guidance_scale_file.FILE)
    return {(row["pair"], row["level"]): row for row in found["rows"]}


def measured(*words: object) -> int:
    few = ("--samples", 60, "--levels", *LEVELS)
    return main(["guidance-scale", *map(str, (*words, *few))])


@pytest.mark.slow  # it trains three runs
def test_runs_are_each_others_instruments_and_controls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = ("train.steps=60", "train.save_every=30", "train.lr=0.004", "train.ema=0.9", "train.batch=32")
    made = {"dense0": ("seed=0",), "dense1": ("seed=1",), "routed": ("seed=0", "route=1-2")}
    runs = {k: train(small(tmp_path / "runs", *long, *v), quiet=True) for k, v in made.items()}
    assert measured(*runs.values(), "--out", tmp_path, "--against", f"{runs['dense1']}@30") == 0
    printed = capsys.readouterr().out
    routed, dense = rows(runs["routed"]), rows(runs["dense0"])
    over = f"over {runs['dense1'].name}@30"
    contrasts = {"dense - routed", "dense - equal loss"}
    assert {pair for pair, _ in routed} == contrasts | {*("dense", "routed", "dense over routed", "equal loss", over)}
    assert {pair for pair, _ in dense} == {"dense", "two seeds", over}
    for table in (routed, dense):
        for (pair, _), row in table.items():
            # The other dense run is the instrument: it cannot be its own.
            assert ("instrumented" in row) == (pair not in ("two seeds", over)), pair
            assert ("square" in row) == (pair not in contrasts)
    assert {level for _, level in routed} == {*LEVELS, None}
    # The contrast is that of the values, and both passes were measured on the same noisy inputs.
    for form in ("plain", "instrumented"):
        at = {pair: routed[pair, 1.5][form] for pair in ("dense", "routed", "dense - routed")}
        assert at["dense - routed"] == pytest.approx(at["dense"] - at["routed"])
    passes = routed["dense over routed", 9.0]
    assert passes["loss_strong"] == routed["dense", 9.0]["loss_strong"]
    assert passes["loss_weak"] == routed["routed", 9.0]["loss_strong"] != passes["loss_strong"]
    assert f"the instrument is {runs['dense1'].name}".replace("_", "\\_") in printed
    assert "equal loss is that of" in printed
    for name in ("tables/guidance_scale.tex", "tables/guidance_scale.md", "figures/guidance_scale.png"):
        assert (tmp_path / name).stat().st_size
    # What is stored reaches the usual tables and figures.
    study = Results.of(runs["routed"].parent, None)
    table = make("guidance_scale", study)
    assert table.covered and len(table.groups) == 2
    assert main(["figures", str(study.roots[0]), "--only", "guidance_scale"]) == 0


def test_without_an_instrument_there_is_the_plain_form_and_a_sentence(
    models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert measured(models["flow"]) == 0
    assert "plain form only, for want of an instrument" in capsys.readouterr().out
    found = guidance_scale_file.read_scales(Path(f"flow.{guidance_scale_file.FILE}"))
    assert not models["flow"].with_name(f"flow.{guidance_scale_file.FILE}").exists()
    assert not any("instrumented" in row for row in found["rows"])


def test_batches_and_companions_do_not_change_a_run(models: dict[str, Path]) -> None:
    routed = models["routed"]
    alone = Measurement([routed], LEVELS, 50, 7, "cpu").measure(routed)
    among = Measurement(list(models.values()), LEVELS, 50, 50, "cpu").measure(routed)
    for key in ("plain", "square", "loss_weak"):
        first, second = ({(r["pair"], r["level"]): r.get(key) or 0 for r in m["rows"]} for m in (alone, among))
        assert first == pytest.approx({pair: second[pair] for pair in first}, rel=2e-3)
    # The other seed is the instrument; one that never saw the null class is no control.
    assert among["notes"][0] == "routed.safetensors: the instrument is other.safetensors."
    assert "is that of dense" in among["notes"][1] or "is that of other" in among["notes"][1]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("{blind}",), "has no null class"),
        (("{dense}", "--against", "{flow}", "--samples", "20"), "has other data, task or objective"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(
    models: dict[str, Path], words: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["guidance-scale", *(word.format(**models) for word in words)]) == 2
    said = capsys.readouterr().err
    assert len(said.strip().splitlines()) == 1
    assert re.search(sentence, said)

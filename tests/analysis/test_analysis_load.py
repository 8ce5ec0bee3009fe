"""Run folders to a data frame: types, damage, unfinished runs, many runs, no torch."""

import importlib.util
import json
from pathlib import Path

import pandas as pd
import pytest
from analysis_runs import METRIC, append, evaluate, score, write
from suite import RESULTS

import analysis
from analysis.command import main
from analysis.comparison.results import Results
from analysis.errors import AnalysisError
from analysis.runs.grouping import assign_groups
from analysis.tables import make
from analysis.tables.table import markdown


def test_one_row_per_run_with_typed_columns(tmp_path):
    write(tmp_path, "dit", "none", 0)
    write(tmp_path / "deeper", "mamba", "2-8@0.75", 1, routing__selection="rows")
    frame = analysis.load(tmp_path)
    assert len(frame) == 2 and frame.attrs == {} and analysis.problems(tmp_path).empty
    assert frame["seed"].dtype == "Int64" and frame["config.routing.shared"].dtype == "boolean"
    assert frame["config.train.lr"].dtype == "float64" and frame["backbone"].dtype == "string"
    row = frame[frame["backbone"] == "mamba"].iloc[0]
    assert (row["span"], row["rate"], row["selection"], row["method"]) == ("2-8", 0.75, "rows", "TREAD")
    assert json.loads(row["config.train.betas"]) == [0.9, 0.999]
    scores = analysis.scores(frame)
    assert set(scores.loc[scores["metric"] == METRIC, "better"]) == {"lower"}
    assert pd.isna(frame["config.backbone.depth"]).all()


@pytest.mark.parametrize("kind", [str, Path])
def test_an_archive_of_records_is_read_like_a_folder(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    archive = kind(RESULTS / "scan_order.tar.gz")
    runs = analysis.load(archive, backbone="mamba")
    assert set(runs["backbone"]) == {"mamba"}
    write(tmp_path / "more", "dit")
    assert len(analysis.load([archive, tmp_path / "more"])) == 19 and analysis.problems(archive).empty
    assert set(analysis.scores(archive)["path"]) == set(analysis.load(archive)["path"])
    assert make("scan_order", archive).covered and Results.of(archive).roots[0].is_dir()
    for name, content in (("absent.tar.gz", None), ("damaged.tar.gz", b"\x1f\x8b nothing")):
        if content:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(AnalysisError, match=name):
            analysis.load(kind(name))


def test_a_route_in_stages_is_read_and_is_another_treatment_than_its_first(tmp_path):
    for route in ("none", "2-8/0.9:none"):
        write(tmp_path, route=route)
    (base,) = Results.of(tmp_path).groups
    assert base.guideline() is None  # no guideline's route throughout
    for route in ("2-8", "3-8@0.75/0.5:none"):
        write(tmp_path, route=route)
    frame = analysis.load(tmp_path)
    assert len(frame) == 4 and analysis.problems(tmp_path).empty
    row = frame[frame["route"] == "3-8@0.75/0.5:none"].iloc[0]
    assert (row["span"], row["rate"], row["method"]) == ("3-8", 0.75, "TREAD")
    (base,) = Results.of(frame).groups
    assert {cell.name for cell in base.routed} == {*frame["route"]} - {"none"}
    assert base.guideline().name == "2-8" and base.baseline.name == "dense"
    assert {"2-8/0.9:none", "2-8"} <= {row.entries[0].text for row in make("treatments", frame).rows}


def test_a_step_of_a_scheduled_route_costs_what_the_run_counted(tmp_path):
    for off_after in (1.0, 0.5):
        folder = write(tmp_path, route="2-8", routing__off_after=off_after)
        found = json.loads((folder / "summary.json").read_text())
        dense, routed = found["macs_dense"], found["macs_routed"]
        mean = off_after * routed + (1 - off_after) * dense
        found["macs"] = 400 * 64 * mean * (1 + 1e-12)  # sums of many steps round
        (folder / "summary.json").write_text(json.dumps(found))
    write(tmp_path)
    (base,) = Results.of(tmp_path).groups
    shares = {cell.name: cell.macs_share for cell in base.routed}
    assert shares == {"2-8": routed / dense, "2-8, off_after=0.5": pytest.approx((1 + routed / dense) / 2)}


# File, what it holds (None: it is missing), and the reason that is given.
DAMAGE = [
    ("summary.json", '{"status": "do', "not JSON"),
    ("summary.json", None, "neither summary.json nor status.json"),
    ("config.yaml", "a: [1", "config.yaml"),
    ("config.yaml", r'{"backbone": {"name": "dit\0"}, "a": 1}', "an invalid character"),
    ("config.yaml", "a: !!python/object/apply:os.system ['true']", "config.yaml"),
    ("config.yaml", None, "config.yaml cannot be read"),
    ("scores.jsonl", "nonsense\n{}\n", "line 1 is not a JSON object"),
]


def test_damaged_and_unfinished_folders_are_listed_and_not_fatal(tmp_path, capsys):
    write(tmp_path)
    write(tmp_path, seed=99).rename(tmp_path / "bad\udcff")
    reasons = {"bad\\xff": "rename the folder"}
    for seed, (name, content, reason) in enumerate(DAMAGE, 1):
        folder = write(tmp_path, seed=seed)
        reasons[folder.name] = reason
        (folder / name).unlink() if content is None else (folder / name).write_text(content)
    # Only a summary proves that a run has finished; a heartbeat that says so does not.
    for seed, status in ((50, "running"), (51, "done")):
        folder = write(tmp_path, seed=seed)
        (folder / "summary.json").unlink()
        (folder / "status.json").write_text(json.dumps({"status": status, "step": 30, "steps": 400}))
    with pytest.warns(UserWarning, match=f"{len(reasons)} damaged run folders were left out"):
        assert len(analysis.load(tmp_path)) == 1
    problems = analysis.problems(tmp_path)
    is_damaged = problems["status"] == "damaged"
    found = problems[is_damaged].set_index("run")["reason"].to_dict()
    assert found.keys() == reasons.keys()
    assert all(reasons[run] in reason for run, reason in found.items()), found
    assert problems.loc[~is_damaged, ["status", "step"]].to_numpy().tolist() == [["running", 30], ["unfinished", 30]]
    assert main(["list", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"1 done, 2 unfinished, {len(reasons)} damaged" in out and "damaged     bad\\xff" in out


def test_curves_and_scores_carry_the_cost(tmp_path):
    write(tmp_path, route="2-8")
    curves = analysis.curves(tmp_path, columns=("time", "loss", "macs", "absent"))
    assert curves["step"].tolist() == list(range(10, 401, 10))
    assert curves["time"].is_monotonic_increasing and curves["absent"].isna().all()
    scores = analysis.scores(tmp_path)
    own = scores[scores["metric"] == METRIC]
    at = own.set_index("step")["macs"]
    assert at[200] == curves.set_index("step")["macs"][200]
    assert (at.diff().dropna() > 0).all()


def test_evaluations_beside_a_run_are_scores_but_never_its_own(tmp_path):
    folder = write(tmp_path, route="2-8")
    before = analysis.load(tmp_path)[f"score.{METRIC}"].item()
    # Later, with other guidance or seeds.
    append(folder, score({}, 400, 1.0, guidance="none"), score({}, 400, 2.0, seed=7))
    evaluate(folder, "aaaa", [score({}, 400, 1.5, guidance="none scale=1.0"), score({}, 400, 2.5)])
    (folder / "evaluations" / "bbbb.json").write_text('{"scores": [')
    with pytest.warns(UserWarning, match="bbbb.json cannot be read: .*is not JSON"):
        found = analysis.scores(tmp_path)
    others = found[found["value"].isin([1.0, 1.5, 2.0, 2.5])]
    assert len(others) == 4 and not others["own"].any()
    assert analysis.load(tmp_path)[f"score.{METRIC}"].item() == before


@pytest.mark.parametrize(
    ("route", "options", "name"),
    [
        ("none", {}, "dense"),
        ("2-8", {}, "TREAD"),
        ("0-4+6-9", {"routing__reinsert": "sum_input", "train__loss": "ensemble"}, "TREAD v1"),
        ("0-11", {"routing__reinsert": "none"}, "dropping"),
        ("0-11", {"routing__reinsert": "none", "backbone__decoder": {"depth": 2}}, "MaskDiT"),
        ("2-8@0.75", {"routing__learned": "fuse"}, "SPRINT"),
        ("2-8", {"routing__learned": "router"}, "learned router"),
        ("2-8", {"routing__remove": "after:4"}, "delayed removal"),
        ("2-8", {"routing__remove": "never"}, "no removal (control)"),
        ("2-8", {"train__encoder": "random"}, "TREAD + REPA"),
    ],
)
def test_a_run_is_named_by_what_it_does_with_its_tokens(tmp_path, route, options, name):
    write(tmp_path, route=route, **options)
    assert analysis.load(tmp_path)["method"].item() == name


DECODER = {"depth": 2, "width": 64}


@pytest.mark.parametrize(
    ("shared", "key", "values", "names"),
    [
        ({}, "train__encoder", ("random", "probe"), {"TREAD + REPA 2-8, train.encoder=random", "TREAD + REPA 2-8, train.encoder=probe"}),
        ({}, "train__encoder", ("random", "ema"), {"TREAD + REPA 2-8", "TREAD + SRA 2-8"}),
        ({"train__encoder": "ema"}, "train__teacher_offset", (0.0, 0.2), None),
        ({"train__encoder": "probe"}, "train__align_weight", (0.5, 1.0), None),
        ({"routing__reinsert": "none", "backbone__decoder": DECODER}, "train__mae_weight", (0.1, 0.2), None),
        ({"routing__reinsert": "none"}, "routing__remove", ("start", "after:3"), {"dropping 2-8", "dropping 2-8, remove=after:3"}),
        ({"routing__reinsert": "sum_input"}, "train__loss", ("plain", "ensemble"), None),
        ({"routing__selection": "blocks"}, "routing__block", (2, 4), None),
        # What acts on nothing tells nothing apart.
        ({}, "routing__block", (2, 4), {"2-8"}),
        ({}, "train__mae_weight", (0.1, 0.2), {"2-8"}),
        ({"route": "none"}, "routing__remove", ("start", "after:3"), {"dense"}),
    ],
)  # fmt: skip
def test_no_cell_mixes_runs_that_route_differently(tmp_path, shared, key, values, names):
    for value in values:
        write(tmp_path, **{"route": "2-8", **shared, key: value})
    (base,) = Results.of(tmp_path).groups
    found = {cell.name for cell in base.variants}
    assert found == names if names else len(found) == 2


def test_runs_and_scores_survive_what_data_frames_go_through(tmp_path):
    for place, seed in enumerate((0, 1)):
        for route in ("none", "2-8"):
            write(tmp_path / str(place), route=route, seed=seed, evaluations=2)
    expected = markdown(make("main", tmp_path))
    notes = pd.DataFrame({"path": analysis.load(tmp_path)["path"], "note": "mine"})
    for read in (analysis.load, lambda root: analysis.scores(analysis.load(root))):
        frame = read(tmp_path)
        changed = {"merge": frame.merge(notes, on="path")}
        changed["concat"] = pd.concat([read(tmp_path / place) for place in "01"])
        if importlib.util.find_spec("pyarrow"):
            frame.to_parquet(tmp_path / "frame.parquet")
            changed["parquet"] = pd.read_parquet(tmp_path / "frame.parquet")
        for way, result in changed.items():
            assert result.attrs == {} and markdown(make("main", result)) == expected, way
    assert len(analysis.curves(changed["concat"].drop_duplicates("path"))) == 4 * 40


def test_groups_of_frames_that_were_loaded_apart_are_told_apart(tmp_path):
    for place, lr in (("a", 1e-3), ("b", 2e-3)):
        write(tmp_path / place, train__lr=lr)
    parts = [analysis.load(tmp_path / place) for place in "ab"]
    assert parts[0]["group"].item() == parts[1]["group"].item()  # each alone needs no more words
    runs = assign_groups(pd.concat(parts, ignore_index=True))
    assert runs["group"].nunique() == 2 and len(Results.of(pd.concat(parts)).groups) == 2

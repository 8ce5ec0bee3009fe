"""Run folders to a data frame: types, damage, unfinished runs, many runs, no torch."""

import json
import os
import subprocess
import sys
import warnings

import pandas as pd
import pytest
from analysis_runs import ACCURACY, METRIC, score, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import analysis
from analysis.errors import AnalysisError
from analysis.grouping import assign_groups
from analysis.results import Results
from analysis.run_files import Damaged, leaves, read_lines
from analysis.run_rows import typed
from analysis.tables import TABLES, make, make_all
from analysis.tables.table import markdown


def test_one_row_per_run_with_typed_columns(tmp_path):
    write(tmp_path, "dit", "none", 0)
    write(tmp_path / "deeper", "mamba", "2-8@0.75", 1, routing__selection="rows")
    frame = analysis.load(tmp_path)
    assert len(frame) == 2 and frame.attrs == {} and analysis.problems(tmp_path).empty
    assert frame["seed"].dtype == "Int64" and frame["config.routing.shared"].dtype == "boolean"
    assert frame["config.train.lr"].dtype == "float64" and frame["backbone"].dtype == "string"
    row = frame[frame["backbone"] == "mamba"].iloc[0]
    assert (row["span"], row["rate"], row["selection"], row["method"]) == (
        "2-8",
        0.75,
        "rows",
        "TREAD",
    )
    assert json.loads(row["config.train.betas"]) == [0.9, 0.999]
    scores = analysis.scores(frame)
    assert set(scores.loc[scores["metric"] == METRIC, "better"]) == {"lower"}
    assert pd.isna(frame["config.backbone.depth"]).all()


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


def test_a_runs_score_is_its_own_protocols_last(tmp_path):
    folder = write(tmp_path, route="2-8", guidance=True)
    own = json.loads((folder / "summary.json").read_text())["scores"]
    rows = read_lines(folder / "scores.jsonl")
    last = [
        r
        for r in rows
        if r["step"] == 400 and r["metric"] == METRIC and r["guidance"] == "cfg scale=1.5"
    ]
    frame = analysis.load(tmp_path)
    assert frame[f"score.{METRIC}"].item() == last[0]["value"] != own[METRIC]
    assert frame["guidance"].item() == "cfg scale=1.5"


def test_later_evaluations_under_another_protocol_do_not_replace_it(tmp_path):
    folder = write(tmp_path)
    before = analysis.load(tmp_path)[f"score.{METRIC}"].item()
    with (folder / "scores.jsonl").open("a") as stream:
        stream.write(json.dumps(score({}, 400, 1.0, guidance="none")) + "\n")
        stream.write(json.dumps(score({}, 400, 2.0, seed=7)) + "\n")
    assert analysis.load(tmp_path)[f"score.{METRIC}"].item() == before
    assert set(analysis.scores(tmp_path)["value"]) >= {1.0, 2.0}


def test_damaged_and_unfinished_folders_are_listed_and_not_fatal(tmp_path):
    write(tmp_path, seed=0)
    breakages = {
        "summary": lambda f: (f / "summary.json").write_text('{"status": "do'),
        "list": lambda f: (f / "summary.json").write_text("[1]"),
        "config": lambda f: (f / "config.yaml").write_text("a: [1"),
        "binary": lambda f: (f / "config.yaml").write_bytes(b"\xff\xfe\x00"),
        "no config": lambda f: (f / "config.yaml").unlink(),
        "scores": lambda f: (f / "scores.jsonl").write_text("nonsense\n{}\n"),
        "no status": lambda f: (f / "summary.json").unlink(),
        "tag": lambda f: (f / "config.yaml").write_text(
            "a: !!python/object/apply:os.system ['true']"
        ),
    }
    for seed, damage in enumerate(breakages.values(), 1):
        damage(write(tmp_path, seed=seed))
    live = write(tmp_path, seed=50)
    (live / "summary.json").unlink()
    (live / "status.json").write_text(
        json.dumps({"status": "running", "step": 30, "steps": 400, "eta_s": 12.5})
    )
    with pytest.warns(UserWarning, match=f"{len(breakages)} damaged run folders were left out"):
        frame = analysis.load(tmp_path)
    assert len(frame) == 1
    problems = analysis.problems(tmp_path)
    damaged = problems[problems["status"] == "damaged"]
    assert len(damaged) == len(breakages) and damaged["reason"].str.len().gt(0).all()
    unfinished = problems[problems["status"] != "damaged"]
    assert unfinished[["status", "step"]].to_numpy().tolist() == [["running", 30]]


BAD = [
    ("config.yaml", "[" * 40_000, "nested deeper than"),
    ("config.yaml", "- " * 40_000 + "1", "nested deeper than"),
    ("config.yaml", r'{"backbone": {"name": "dit\0"}, "a": 1}', "no text"),
    ("summary.json", r'{"status": "done", "step": 1, "name": "a\u0000"}', "no text"),
    ("summary.json", r'{"status": "done", "step": 1, "name": "a\ud800"}', "no text"),
    ("summary.json", '{"status": "done", "step": 1' + "0" * 400 + "}", "a number of more than"),
    ("status.json", r'{"status": "\ud800"}', "no text"),
]


@pytest.mark.slow
def test_one_bad_folder_is_listed_and_all_commands_go_on(tmp_path, capsys):
    from analysis.command import main

    for route in ("none", "2-8"):
        write(tmp_path, route=route, samples=True)
    reasons = {"bad\\xff": "rename the folder"}
    odd = write(tmp_path, seed=99).rename(tmp_path / "bad\udcff")
    for seed, (name, content, reason) in enumerate(BAD, 1):
        bad = write(tmp_path, seed=seed)
        (bad / name).write_text(content)
        if name == "status.json":
            (bad / "summary.json").unlink()
        reasons[bad.name] = reason
    damaged = analysis.problems(tmp_path).set_index("run")["reason"].to_dict()
    assert damaged.keys() == reasons.keys()
    assert all(reasons[run] in reason for run, reason in damaged.items()), damaged
    assert main(["list", str(tmp_path)]) == main(["report", str(tmp_path)]) == 0
    assert main(["publish", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    out, err = capsys.readouterr()
    assert f"2 done, 0 unfinished, {len(reasons)} damaged" in out and "damaged: bad\\xff" in err
    (odd / "model.safetensors").touch()
    assert main(["similarity", str(odd)]) == 2
    assert "rename the folder" in capsys.readouterr().err


def test_a_heartbeat_that_says_done_is_not_a_finished_run(tmp_path):
    folder = write(tmp_path)
    (folder / "summary.json").unlink()
    (folder / "status.json").write_text('{"status": "done", "step": 400}')
    frame = analysis.load(tmp_path)
    assert frame.empty and analysis.problems(tmp_path)["status"].tolist() == ["unfinished"]


def test_a_half_written_last_line_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [row["step"] for row in read_lines(path)] == [1, 2]
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(Damaged, match="line 2"):
        read_lines(path)


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


@pytest.mark.parametrize(("key", "value"), [("wall_s", 1e300), ("wall_s", 1e-300), ("macs_routed", 1e300)])
def test_numbers_that_nobody_measured_overflow_no_table(key, value, tmp_path):
    for seed in (0, 1, 2):
        folder = write(tmp_path, seed=seed)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {key: value}))
    results = Results.of(tmp_path)
    assert len(results.runs) == 2 + (value < 1) and len(results.problems) == (value > 1)
    assert len(make_all(results)) == len(TABLES)


def test_numbers_beyond_any_float_are_no_points_of_a_curve(tmp_path):
    folder = write(tmp_path)
    huge = "1" + "0" * 400
    lines = [
        f'{{"step": {value}, "loss": 1.0, "macs": 1}}' for value in ("1e999", huge, "true", "5")
    ]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, f'{{"step": 6, "loss": {huge}}}']))
    curves = analysis.curves(tmp_path)
    assert curves["step"].tolist() == [5, 6] and curves["loss"].isna().tolist() == [False, True]
    with (folder / "scores.jsonl").open("a") as stream:
        stream.write(f'{{"metric": "a\\u0000", "value": 1}}\n{{"metric": "a", "value": {huge}}}\n')
    assert set(analysis.scores(tmp_path)["metric"]) == {METRIC, ACCURACY}


def test_no_folder_is_a_user_error(tmp_path):
    with pytest.raises(AnalysisError, match="not a folder"):
        analysis.load(tmp_path / "absent")
    assert analysis.load(tmp_path).empty


def test_two_thousand_runs_load_with_one_parse_per_distinct_config_block(tmp_path):
    from analysis.run_files import _parse

    folder = write(tmp_path, evaluations=2)
    for seed in range(1, 2000):
        copy = tmp_path / f"run-{seed}"
        copy.mkdir()
        for name in ("summary.json", "scores.jsonl"):
            os.link(folder / name, copy / name)
        text = (folder / "config.yaml").read_text()
        (copy / "config.yaml").write_text(text.replace("seed: 0\n", f"seed: {seed}\n", 1))
    _parse.cache_clear()
    frame = analysis.load(tmp_path)
    assert len(frame) == 2000 and set(frame["config.seed"]) == set(range(2000))
    # What makes it seconds: the blocks that runs share are parsed once.
    assert _parse.cache_info().misses < 2000 + 40


def test_import_and_load_and_tables_need_no_torch(tmp_path):
    write(tmp_path)
    code = (
        "import sys, analysis; analysis.load(sys.argv[1]); analysis.tables.make_all(sys.argv[1]);"
        "bad = [m for m in ('torch', 'matplotlib', 'experiments.components') if m in sys.modules]; sys.exit(str(bad) if bad else 0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.lists(st.dictionaries(st.sampled_from("abc"), values, max_size=3), max_size=5))
def test_any_values_become_columns_of_one_type(rows):
    frame = typed([leaves(row) for row in rows])
    assert len(frame) == len(rows)
    assert {str(t) for t in frame.dtypes} <= {"boolean", "Int64", "float64", "string"}


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None
)
@given(
    st.sampled_from(
        ["config.yaml", "summary.json", "status.json", "scores.jsonl", "metrics.jsonl"]
    ),
    st.binary(max_size=60),
)
def test_no_bytes_in_any_file_are_fatal(tmp_path_factory, name, content):
    root = tmp_path_factory.mktemp("fuzz")
    folder = write(root, evaluations=1)
    (folder / name).write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is left out is named
        frame = analysis.load(root)
        analysis.curves(frame)
        analysis.scores(frame)
    assert len(frame) + len(analysis.problems(root)) == 1


def test_fields_that_a_score_lacks_do_not_hide_it(tmp_path):
    folder = write(tmp_path)
    lines = [
        {k: v for k, v in row.items() if k != "weights"}
        for row in read_lines(folder / "scores.jsonl")
    ]
    lines = [{**row, "reference": None} for row in lines]
    (folder / "scores.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    assert analysis.scores(tmp_path)["own"].all()


def test_evaluations_beside_a_run_are_scores_but_never_its_own(tmp_path):
    folder = write(tmp_path, route="2-8")
    before = analysis.load(tmp_path)[f"score.{METRIC}"].item()
    records = folder / "evaluations"
    records.mkdir()
    lines = [score({}, 400, 1.5, guidance="none scale=1.0"), score({}, 400, 2.5)]
    (records / "step-00000400-aaaa.json").write_text(json.dumps({"scores": lines}))
    (records / "step-00000400-bbbb.json").write_text('{"scores": [')
    with pytest.warns(UserWarning, match="bbbb.json cannot be read"):
        found = analysis.scores(tmp_path)
    assert (
        set(found.loc[found["value"].isin([1.5, 2.5]), "own"]) == {False}
        and len(found[found["value"] < 3]) >= 2
    )
    assert analysis.load(tmp_path)[f"score.{METRIC}"].item() == before


@pytest.mark.parametrize(
    ("route", "options", "name"),
    [
        ("none", {}, "dense"),
        ("2-8", {}, "TREAD"),
        ("0-4+6-9", {"routing__reinsert": "sum_input"}, "TREAD v1"),
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


def test_methods_of_one_backbone_share_a_base(tmp_path):
    write(tmp_path)
    write(tmp_path, route="0-11", routing__reinsert="none", backbone__decoder={"depth": 2})
    write(tmp_path, route="2-8", train__encoder="random")
    (base,) = Results.of(tmp_path).groups
    assert base.baseline is not None and len(base.routed) == 2


DECODER = {"depth": 2, "width": 64}


@pytest.mark.parametrize(
    ("shared", "key", "values", "names"),
    [
        ({}, "train__encoder", ("random", "probe"), {"TREAD + REPA 2-8, train.encoder=random", "TREAD + REPA 2-8, train.encoder=probe"}),
        ({}, "train__encoder", ("random", "ema"), {"TREAD + REPA 2-8", "TREAD + SRA 2-8"}),
        ({"train__encoder": "ema"}, "train__teacher_offset", (0.0, 0.2), None),
        ({"train__encoder": "probe"}, "train__align_weight", (0.5, 1.0), None),
        ({"train__encoder": "probe"}, "backbone__align", (None, {"block": 4}), None),
        ({"train__encoder": "probe"}, "routing__remove", ("after:3", "after:4"), None),
        ({"routing__reinsert": "none", "backbone__decoder": DECODER}, "train__mae_weight", (0.1, 0.2), None),
        ({"routing__reinsert": "none"}, "backbone__decoder", (DECODER, DECODER | {"depth": 4}), None),
        ({"routing__reinsert": "none"}, "routing__remove", ("start", "after:3"), {"dropping 2-8", "dropping 2-8, remove=after:3"}),
        ({"routing__learned": "fuse"}, "routing__remove", ("start", "after:3"), None),
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


@pytest.mark.parametrize(("data", "rows"), [("fashion", 1), ("latents", 2)])
def test_where_published_files_lay_parts_no_runs(tmp_path, data, rows):
    write(tmp_path, data__name=data, data__path="/here")
    write(tmp_path, data__name=data, data__path="/there", route="2-8")
    assert len(Results.of(tmp_path).groups) == rows


def test_runs_are_named_by_what_may_be_averaged(tmp_path):
    for seed in (0, 1):
        write(tmp_path, route="2-8", seed=seed, evaluations=2)
        write(tmp_path, route="2-8", seed=seed, evaluations=2, routing__selection="rows")
        write(tmp_path, route="2-8", seed=seed, evaluations=2, train__lr=1e-4)
    scores = analysis.scores(analysis.load(tmp_path))
    cells = scores.groupby(["group", "variant", "metric", "step"])["seed"]
    assert (cells.nunique() == cells.size()).all() and len(cells) == 3 * 2 * 2


def test_the_parent_of_a_link_is_where_the_link_leads(tmp_path):
    path = write(tmp_path / "a" / "runs")
    write(tmp_path / "b")
    (tmp_path / "link").symlink_to(path)
    assert len(analysis.load(tmp_path / "link" / "..")) == 1


@pytest.mark.parametrize("way", ["merge", "concat", "parquet", "another library"])
def test_runs_and_scores_survive_what_data_frames_go_through(way, tmp_path):
    for place, seed in enumerate((0, 1)):
        for route in ("none", "2-8"):
            write(tmp_path / str(place), route=route, seed=seed)
    expected = {name: analysis.tables.make(name, tmp_path) for name in ("main", "all_scores", "differences")}

    def changed(read):
        frame = read(tmp_path)
        if way == "merge":
            notes = pd.DataFrame({"path": frame["path"].unique(), "note": "mine"})
            return frame.merge(notes, on="path")
        if way == "concat":
            return pd.concat([read(tmp_path / place) for place in "01"])
        if way == "parquet":
            pytest.importorskip("pyarrow")
            frame.to_parquet(tmp_path / "frame.parquet")
            return pd.read_parquet(tmp_path / "frame.parquet")
        return pd.DataFrame(frame.to_dict("list"))

    for read in (analysis.load, lambda root: analysis.scores(analysis.load(root))):
        frame = changed(read)
        assert frame.attrs == {}
        for name, table in expected.items():
            assert markdown(analysis.tables.make(name, frame)) == markdown(table)
    runs = changed(analysis.load)
    assert analysis.figures.make("overview", runs) is None
    assert len(analysis.curves(runs)) == 4 * 40


def test_a_frame_that_is_none_of_runs_is_refused():
    with pytest.raises(AnalysisError, match="no column run, path"):
        analysis.tables.make("main", pd.DataFrame({"backbone": ["dit"], "route": ["none"]}))


def test_groups_of_frames_that_were_loaded_apart_are_told_apart(tmp_path):
    for place, lr in (("a", 1e-3), ("b", 2e-3)):
        write(tmp_path / place, train__lr=lr)
    parts = [analysis.load(tmp_path / place) for place in "ab"]
    assert parts[0]["group"].item() == parts[1]["group"].item()  # each alone needs no more words
    runs = assign_groups(pd.concat(parts, ignore_index=True))
    assert runs["group"].nunique() == 2 and len(Results.of(pd.concat(parts)).groups) == 2

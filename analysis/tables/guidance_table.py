"""Guidance: kinds and their cost (SG, Tables 1 to 3), responses to it, the effective scale."""

import dataclasses
import itertools
import operator
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.runs.cells import Base, Cell, Study
from analysis.runs.run_files import Damaged, read_json
from analysis.runs.run_records import AnalysisError, read_beside
from analysis.runs.seed_statistics import extent, mean_std, paired
from analysis.tables import paper
from analysis.tables import table as tables
from analysis.tables.main_table import score_set
from analysis.tables.table import Column, Entry, Table, Value, build, ours
from experiments.runtime.parsing import is_number

# Kinds of scores that guidance moves.
_RESPOND = ("fd", "precision", "recall", "accuracy", "adherence")
# What `routed` leaves unsaid when it has its default (conf/guidance/routed.yaml: SG_FLOPS).
_ROUTED = {"strong": "0.5", "weak": "0.9"}
# What scores share that are compared over guidances.
_WAY = ("metric", "sampler", "reference", "weights")


def parse(text: str) -> tuple[str, dict[str, str]]:
    """Read a score's guidance, such as `cfg scale=1.5`, into its kind and its options.

    A score leaves out options that have their default; the two rates of `routed` are filled in.
    """
    kind, _, rest = str(text).partition(" ")
    found = dict(re.findall(r"([A-Za-z_]+)=(\S+)", rest))
    return kind, ({**_ROUTED, **found} if kind == "routed" else found)


def number(text: str | None) -> float | None:
    """Return a rate or scale as a number; None for a schedule such as `cosine:0.6:0`."""
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None


def evaluations(
    study: Study, base: Base, cell: Cell, metric: str | None = None,
    wanted: Callable[[str], object] = bool,
) -> pd.DataFrame:  # fmt: skip
    """Return a cell's scores after one number of steps, one row per run and guidance.

    The metric is the one named (the base's own), or its kind at another number of samples,
    whichever was measured under most of the guidances that are wanted; likewise one sampler, one
    reference and one kind of weights, of two as good the run's own. The steps are those after which
    most guidances of most runs were scored.
    """
    metric, known = metric or base.metric, study.scores
    if known.empty:
        return pd.DataFrame()
    rows = known[known["run"].isin(cell.runs["run"])].dropna(subset=["seed", "step"])
    # By kind: the cell's runs may have been scored at another number of samples than the base's.
    about = base.known.get(metric, {})
    for key in ("key", "features"):
        rows = rows[rows[key].map(_text) == _text(about.get(key))]
    # A weaker model is named by its step alone: seeds' paths differ.
    path, own = r"checkpoint=\S*?(@\d+)?(?=\s|$)", r"checkpoint=run\1"
    said = [re.sub(path, own, str(text)) for text in rows["guidance"].fillna("not said")]
    rows = rows.assign(guidance=said)[[bool(wanted(text)) for text in said]]
    if rows.empty:
        return rows
    ways = [tuple(map(_text, row)) for row in rows[[*_WAY]].to_numpy()]
    counts = Counter(way for way, _ in dict.fromkeys(zip(ways, rows["guidance"], strict=True)))
    usual = metric, _text(cell.first("sampler")), _text(cell.first("reference")), "ema"
    chosen = max(counts, key=lambda way: (counts[way], sum(map(operator.eq, way, usual))))
    rows = rows[[way == chosen for way in ways]]
    # A run that was trained on, for another sweep, is read at the step that was compared.
    kinds = rows.drop_duplicates(["run", "step", "guidance"])["step"].value_counts()
    return rows[rows["step"] == max(kinds.index, key=lambda step: (kinds[step], step))]


def _text(value: object) -> str:
    return "" if value is None or value != value else str(value)


def setting(text: str) -> str | None:
    """Return a guidance's place on the response curve: `CFG 1.5`, `SG 1.5`, `routed`; else None.

    SG guides away from a pass at the rate of training, 0.5, towards a dense one.
    """
    kind, options = parse(text)
    scale = number(options.pop("scale", "1"))
    options.pop("route", None)
    if kind in ("none", "cfg") and scale is not None and not options:
        return f"CFG {scale:g}"
    strong, weak = (number(options.pop(key, None)) for key in ("strong", "weak"))
    if kind != "routed" or scale is None or options:
        return None
    if scale == 1:
        return "routed" if strong == 0.5 else None
    return f"SG {scale:g}" if (strong, weak) == (0, 0.5) else None


def responses(study: Study) -> pd.DataFrame:
    """Return how scores respond to guidance: dense and routed, a row per metric and setting.

    A seed of which no guided samples were scored says nothing here and is left out. Columns: base,
    panel, backbone, treatment, metric, better, setting, mean, std, n, step. Empty where no base
    was scored under three settings.
    """
    rows = []
    for base in study.bases:
        found: list[dict[str, Any]] = []
        kinds = {name: about for name, about in score_set(base).items() if about["key"] in _RESPOND}
        for metric, cell in itertools.product(kinds, filter(None, base.pair())):
            frame = evaluations(study, base, cell, metric, setting)
            places = frame["guidance"].map(setting) if len(frame) else pd.Series(dtype=object)
            frame = (
                frame[frame["seed"].isin(frame["seed"][places != "CFG 1"])] if len(frame) else frame
            )
            about = {"base": base.key, "panel": base.label, "treatment": cell.treatment}
            for name, part in frame.groupby(places, sort=True) if len(frame) else ():
                estimate = mean_std(list(by_seed(part).values()))
                assert estimate is not None, "a score is a finite number"
                found.append({
                    **about, "backbone": base.backbone, "setting": str(name),
                    "metric": part["metric"].iloc[0], "better": kinds[metric].get("better"),
                    "mean": estimate.mean, "std": estimate.std, "n": estimate.n,
                    "step": int(part["step"].iloc[0]),
                })  # fmt: skip
        if len({row["setting"] for row in found}) >= 3:
            rows += found
    return pd.DataFrame(rows)


def setting_order(name: str) -> tuple[int, float]:
    """Return the place of a setting on the curve: CFG by scale, then SG, then routed."""
    kind, _, scale = name.partition(" ")
    return ("CFG", "SG", "routed").index(kind), float(scale or 0)


def response(study: Study) -> Table:
    """Every metric of the set over the scales of CFG, under SG and under routed inference."""
    frame = responses(study)
    settings = [] if frame.empty else sorted(set(frame["setting"]), key=setting_order)
    columns = (
        *Column.each("Metric", "Tokens", numeric=False),
        *Column.each(*(settings or ["CFG 1", "CFG 1.5", "SG 1.5", "routed"])),
    )
    rows = []
    for (_, panel), group in [] if frame.empty else frame.groupby(["base", "panel"], sort=False):
        heading = f"{panel}: after {extent(group['step'])} steps, n = {extent(group['n'])}"
        for (metric, tokens), part in group.groupby(["metric", "treatment"], sort=False):
            digits = tables.metric_decimals(str(metric))
            # A lone seed has no spread, which a column of numbers holds as nan.
            spread = part["std"].astype(object).where(part["std"].notna(), None)
            known = zip(part["setting"], part["mean"], spread, strict=True)
            scores = {name: Entry("", mean, std, decimals=digits) for name, mean, std in known}
            label = tables.head(Column(str(metric), better=part["better"].iloc[0]))
            entries = [scores.get(name, "") for name in settings]
            rows.append((heading, [label, str(tokens), *entries]))
    notes = (
        "Mean and standard deviation over seeds. CFG 1 is no guidance; SG guides a dense pass away "
        "from a routed one of the same weights; routed: one pass with the route, as in training.",
    )
    return build("response", "Response to guidance: dense and routed", columns, rows, notes)


def guidance(study: Study) -> Table:
    """Scores and cost under each guidance, per trained cell (SG, Tables 1 and 2)."""
    columns = (
        Column("Guidance", numeric=False),
        Column("Score", better=tables.better_end(study)),
        Column("\u0394 to none"),
        Column("GMACs per sample", decimals=3),
        Column("GMACs per step", decimals=4),
        *Column.each("Paper FID-50K", "Paper GMACs per step", published=True),
    )
    known = {row["key"]: row for row in paper.rows("guidance")}
    rows: list[tuple[str, list[Value]]] = []
    for base, cell in ((one, cell) for one in study.bases for cell in one.cells):
        frame = evaluations(study, base, cell)
        if frame.empty or frame["guidance"].nunique() < 2:
            continue
        sparse = frame[frame["guidance"].str.startswith("routed")]
        means = sparse.groupby("guidance")["value"].mean() * (1 if base.better == "lower" else -1)
        best = None if means.empty else str(means.idxmin())
        measured = f"{frame['metric'].iloc[0]}, after {frame['step'].iloc[0]:.0f} steps"
        parts = {str(text): part for text, part in frame.groupby("guidance", sort=True)}
        none = next((text for text in parts if parse(text)[0] == "none"), None)
        before, digits = by_seed(parts[none]) if none else {}, tables.metric_decimals(base.metric)
        steps = re.search(r"steps=(\d+)", str(frame["sampler"].iloc[0]))  # of `heun steps=12`
        for text, part in parts.items():
            values, (key, options) = by_seed(part), parse(text)
            score = ours(mean_std(list(values.values())), digits)
            delta = ours(paired(before, values), digits, signed=True)
            macs = pd.to_numeric(part["macs_per_sample"], errors="coerce").dropna()
            giga = None if macs.empty else float(macs.mean()) / 1e9
            each = giga / int(steps[1]) if steps and giga is not None and int(steps[1]) else None
            if key == "routed":
                flops = (number(options["strong"]), number(options["weak"])) == (0.5, 0.9)
                key = "sg_flops" if flops else "sg_fid" if text == best else ""
            theirs = [known.get(key, {}).get(name) for name in ("fid", "gmacs")]
            entries = [text, score, Entry() if text == none else delta, giga, each, *theirs]
            rows.append((f"{base.label}, {cell.treatment}: {measured}", entries))
    unrun = [(row["method"], [row["fid"], row["gmacs"]]) for row in known.values()]
    notes = tables.paper_notes(
        "guidance",
        tables.PAIRED,
        "The paper's two sparse settings stand beside ours of the same kind: SG_FLOPS at rates 0.5 "
        "and 0.9, SG_FID beside our best sparse setting.",
    )
    title = "Guidance and its cost (SG, Tables 1 and 2)"
    return build("guidance", title, columns, rows, notes, unrun)


def by_seed(part: pd.DataFrame) -> dict[int, float]:
    """Return seed to the mean of its values."""
    return {int(seed): float(value) for seed, value in part.groupby("seed")["value"].mean().items()}  # type: ignore[call-overload]


# --- the effective scale: what `analysis.guidance_scale` stored beside runs -----------------------

FORMAT = "tread-suite-guidance-scale/1"
FILE = "guidance_scale.json"
#: sigma / alpha over the data's standard deviation: t / (1 - t) at t = .6, .7, .8, .9 and .95 of
#: flow matching, from where a class begins to show to almost noise.
LEVELS = (1.5, 7 / 3, 4.0, 9.0, 19.0)
FORMS = ("plain", "instrumented")
_SCALE_KINDS = {
    "run": str, "backbone": str, "size": str, "data": str, "route": str, "notes": list, "rows": list
}  # fmt: skip
_SHOWN = (*FORMS, "loss_strong", "loss_weak", "square")
# What a row may hold: both forms with their intervals, losses, and the square of the difference.
NUMBERS = [f"{form}{end}" for form in FORMS for end in ("", "_low", "_high")] + [*_SHOWN[2:]]
_HEADINGS = ("Plain", "Instrumented", "Loss, strong", "Loss, weak", "|d|\u00b2")
_SCALE_NOTES = (
    "Class over null prediction of the dense pass (dense) and of the routed pass (routed), the "
    "dense over the routed pass, the same model over one of another seed (two seeds), and dense "
    "weights of nearly the run's held-out loss (equal loss); 1 is calibrated.",
    "An error of the strong prediction's own raises the plain form, to 2 where both are equally "
    "good: what is read as a scale is the instrumented form, and contrasts.",
    "Sigma: sigma / alpha over the data's standard deviation.",
)


def read_scales(path: Path) -> dict[str, Any]:
    """Read what was stored beside a run; raise `AnalysisError` where it is not such a file."""
    try:
        found, reason = read_json(path), "other content"
    except Damaged as error:
        found, reason = {}, str(error)
    kinds = all(isinstance(found.get(key), kind) for key, kind in _SCALE_KINDS.items())
    rows = found["rows"] if kinds else []
    if (
        not (kinds and found.get("format") == FORMAT)
        or not all(is_number(found.get(key)) for key in ("step", "seed"))
        or not all(isinstance(row, dict) and isinstance(row.get("pair"), str) for row in rows)
        or not all(
            row.get(n) is None or is_number(row[n]) for row in rows for n in ("level", *NUMBERS)
        )
    ):
        raise AnalysisError(
            f"{path} is not a {FORMAT} file ({reason}); make one with python -m analysis "
            "guidance-scale RUN"
        )
    return found


def stored_scales(study: Study) -> list[dict[str, Any]]:
    """Return what was stored beside the runs of a study; a broken file is named and left out.

    Each has what tells its runs' setting from others of that model and data, as `apart`, and its
    routed runs' treatment as `route`: one route with two selections is two treatments.
    """
    if study.runs.empty:
        return []
    columns = (study.named[name].map(str) for name in ("path", "setting", "treatment"))
    known = {path: about for path, *about in zip(*columns, strict=True)}

    def apart(path: Path) -> dict[str, Any]:
        found, (setting, treatment) = read_scales(path), known[str(path.parent)]
        _, bracket, more = setting.partition(" (")
        route = "none" if found["route"] == "none" else treatment
        return {**found, "apart": bracket + more, "route": route}

    return read_beside(study.runs, FILE, apart)


def scale_rows(files: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Return the rows of stored scales with what each run is.

    `recipe` is model, data and what tells their settings apart; `setting` adds route and steps,
    which the seeds of one setting share. Who knows what tells two of one seed apart: they have
    their run's name, too.
    """
    about = ("run", "backbone", "data", "route", "seed", "step")
    runs = pd.DataFrame([{key: found[key] for key in about} for found in files], columns=about)
    runs["recipe"] = [
        f"{f['backbone']}-{f['size']}, {f['data']}{f.get('apart', '')}" for f in files
    ]
    runs["setting"] = [
        f"{run.recipe}, {'dense' if run.route == 'none' else f'route {run.route}'}, "
        f"after {run.step:.0f} steps"
        for run in runs.itertuples()
    ]
    twice = runs.duplicated(["setting", "seed"], keep=False)
    runs.loc[twice, "setting"] += ": " + runs["run"]
    known = zip(runs.to_dict("records"), files, strict=True)
    rows = pd.DataFrame([{**run, **row} for run, found in known for row in found["rows"]])
    return rows.reindex(columns=["setting", *about, "pair", "level", *NUMBERS, "recipe"])


def scale_table(files: Sequence[dict[str, Any]], levels: bool = False) -> Table:
    """Return the scales by setting and pair.

    Seeds of one setting are averaged, one alone has its bootstrap interval; `levels` gives a row
    per noise level beside that of their mean, and what was said of each run.
    """
    columns = (*Column.each("Strong over weak", "Sigma", numeric=False), *Column.each(*_HEADINGS))
    groups: dict[tuple[str, str, float | None], list[dict[str, Any]]] = {}
    rows = [row for found in files for row in found["rows"]]
    for heading, row in zip(scale_rows(files)["setting"], rows, strict=True):
        if levels or row.get("level") is None:
            groups.setdefault((heading, row["pair"], row.get("level")), []).append(row)
    shown: list[tuple[str, list[Value]]] = []
    for (heading, pair, level), same in groups.items():
        entries = [_scale_entry(same, name, levels) for name in _SHOWN]
        shown.append((heading, [pair, "mean" if level is None else f"{level:.3g}", *entries]))
    said = dict.fromkeys(note for found in files for note in found["notes"] if levels)
    title, notes = "Effective guidance scale", (*map(str, said), *_SCALE_NOTES)
    return build("guidance_scale", title, columns, shown, notes)


def _scale_entry(rows: list[dict[str, Any]], name: str, one: bool) -> Entry:
    known = [row[name] for row in rows if row.get(name) is not None]
    if not known:
        # A contrast has no loss, and without an instrument there is no instrumented form.
        return Entry("undefined" if any(name in row for row in rows) else "")
    decimals = 3 if name in FORMS else 5
    if len(rows) > 1:
        return dataclasses.replace(ours(mean_std(known), decimals), of=len(rows))
    low, high = (rows[0].get(f"{name}_{end}") for end in ("low", "high"))
    return Entry("", known[0], None, low, high, None if one else 1, decimals=decimals)

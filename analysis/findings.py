"""What runs show, in sentences: the paragraph under a table or a figure, for any folder of runs.

Every sentence is made from the numbers that stand in the table beside it. A difference is told
apart from none where its paired 95 % interval over seeds excludes zero, and not below three seeds.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from analysis.runs.cells import Base, Cell, Study
from analysis.runs.run_records import pick
from analysis.runs.seed_statistics import ENOUGH_SEEDS, Estimate, paired
from analysis.similarity import SimilarityFile
from analysis.tables import guidance_table, main_table
from analysis.tables.table import gap, metric_better, metric_decimals, metric_label
from routing.route import Route


def verdict(found: Estimate, better: str | None) -> str:
    """Return better, worse, higher, lower, or why it can't be told."""
    if found.n < ENOUGH_SEEDS or found.low is None or found.high is None:
        return f"too few seeds to tell (n={found.n})"
    if found.low <= 0 <= found.high:
        return "not told apart"
    end = "higher" if found.mean > 0 else "lower"
    return end if better is None else "better" if better == end else "worse"


def change(found: Estimate, decimals: int) -> str:
    """Return a difference with its interval; of two seeds it would say nothing."""
    text = f"{found.mean:+.{decimals}f}"
    if found.n < ENOUGH_SEEDS or found.low is None or found.high is None:
        return text
    return f"{text} [{found.low:+.{decimals}f}, {found.high:+.{decimals}f}]"


def main(study: Study) -> list[str]:
    """Say for each backbone how the guideline's route changes every score."""
    said = []
    for base, dense, routed in study.pairs():
        kinds = main_table.score_set(base)
        gaps = {name: gap(routed, dense, f"score.{name}") for name in kinds}
        known = {name: found for name, found in gaps.items() if found}
        parts = [
            f"{metric_label(name)} {change(found, metric_decimals(name))}"
            for name, found in known.items()
        ]
        told = [verdict(found, metric_better(kinds[name])) for name, found in known.items()]
        if len(set(told)) > 1:
            parts = [f"{part}: {what}" for part, what in zip(parts, told, strict=True)]
            said.append(f"**{_name(base, dense, routed)}**: {'; '.join(parts)}.")
        elif parts:  # of all alike, such as too few seeds: once
            said.append(f"**{_name(base, dense, routed)}**: {'; '.join(parts)}: {told[0]}.")
    return said


def cost(study: Study) -> list[str]:
    """Say what the route saves of a training step in multiply-adds."""
    said = []
    for base, dense, routed in study.pairs():
        if share := routed.macs_share:
            text = f"{1 / share:.2f} times fewer multiply-adds an image than dense"
            said.append(f"**{_name(base, dense, routed)}**: {text}.")
    return said


def response(study: Study) -> list[str]:
    """Say by how much guidance changes the distance of dense and of routed runs."""
    said = []
    frame = guidance_table.responses(study)
    for (_, panel), part in frame.groupby(["base", "panel"], sort=False) if len(frame) else ():
        metric = part["metric"].iloc[0]
        parts = []
        for tokens, curve in part[part["metric"] == metric].groupby("treatment", sort=False):
            values = curve.set_index("setting")["mean"]
            plain = values.pop("CFG 1") if "CFG 1" in values else None
            if plain:
                ratios = (f"{value / plain:.2f} ({name})" for name, value in values.items())
                parts.append(f"{tokens} {', '.join(ratios)}")
        if parts:
            said.append(f"**{panel}**, {metric} over that without guidance: {'; '.join(parts)}.")
    return said


def scale(study: Study) -> list[str]:
    """Say how the effective guidance scale of routed runs differs from dense ones'."""
    frame, said = guidance_table.scale_rows(guidance_table.stored_scales(study)), []
    frame = frame[frame["level"].isna() & frame["instrumented"].notna()]
    lengths: dict[Any, int] = frame.groupby("recipe")["step"].nunique().to_dict()
    for (model, steps), part in frame.groupby(["recipe", "step"], sort=False):
        name = f"{model}, after {steps:.0f} steps" if lengths[model] > 1 else str(model)
        pairs = {
            key: dict(zip(rows["seed"], rows["instrumented"], strict=True))
            for key, rows in part.groupby(["route", "pair"], sort=False)
        }
        routes = [route for route in part["route"].unique() if route != "none"]
        for route, way in itertools.product(routes, ("dense", "routed")):
            if found := paired(pairs.get(("none", "dense"), {}), pairs.get((route, way), {})):
                about = f"{name}, route {route}" if len(routes) > 1 else name
                text = f"{change(found, 3)}: {verdict(found, None)} (n={found.n})"
                how = f"inference {way}: instrumented w_eff against dense"
                said.append(f"**{about}**, {how} {text}.")
    return said


def placement(study: Study) -> list[str]:
    """Say which routes did best and worst, and how the score goes with the blocks skipped."""
    said = []
    for base in study.bases:
        # Routes are ranked after equal steps alone: those after which most of them were read.
        usual = Counter(cell.steps for cell in base.plain).most_common(1)
        alike = [cell for cell in base.plain if cell.steps == usual[0][0]]
        scores = {cell.treatment: cell.estimate(base.score) for cell in alike}
        ranked = sorted((found.mean, name) for name, found in scores.items() if found)
        seeds = min(found.n for found in scores.values() if found)
        if len(ranked) < ENOUGH_SEEDS:
            continue
        ranked = ranked if base.better == "lower" else ranked[::-1]
        depth = base.any.depth
        blocks = [len(Route.parse(name).resolve(depth).sparse_blocks) for _, name in ranked]
        digits = metric_decimals(base.metric)
        best, worst = (f"{name} ({mean:.{digits}f})" for mean, name in (ranked[0], ranked[-1]))
        few, many = blocks[: len(blocks) // 2], blocks[-(len(blocks) // 2) :]
        said.append(
            f"**{base.label}**, {metric_label(base.metric)}: best {best}, worst {worst}; the "
            f"better half of the {len(ranked)} routes skips {sum(few) / len(few):.1f} blocks, the "
            f"other {sum(many) / len(many):.1f}."
            + ("" if seeds >= ENOUGH_SEEDS else f" With n={seeds} the order of routes is not told.")
        )
    return said


def similarity(maps: Sequence[SimilarityFile], key: str = "cosine") -> list[str]:
    """Say how alike neighbouring blocks are on average, and the input and the last."""
    said = []
    for item in maps:
        found = item.arrays[key]
        text = f"neighbours {found.diagonal(1).mean():.2f}, input and last {found[0, -1]:.2f}"
        said.append(f"**{item.label}**: {text}.")
    return said


FINDINGS: dict[str, Callable[[Study], list[str]]] = {
    "main": main, "cost": cost, "response": response, "scale": scale, "placement": placement,
}  # fmt: skip


def text(lines: Iterable[str]) -> str:
    """Return sentences as a Markdown list, or that these runs do not tell."""
    return "\n".join(f"- {line}" for line in lines) or "- These runs do not tell."


def make(name: str, study: Study, having: Iterable[str] = ()) -> str:
    """Return the sentences of that name as Markdown; of settings whose name holds all the words.

    `UserError` if there is no such name.
    """
    # A sentence begins with what it is said of, in bold.
    lines = ((line.split("**")[1], line) for line in pick("findings", name, FINDINGS)(study))
    return text(line for about, line in lines if all(word in about for word in having))


def _name(base: Base, dense: Cell, routed: Cell) -> str:
    pairs = gap(routed, dense, base.score)
    after = f"after {routed.steps:.0f} steps (n={pairs.n if pairs else 0})"
    return f"{base.label}, {routed.treatment} against dense {after}"

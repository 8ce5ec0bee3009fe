"""The paragraphs of the notebooks: every number is computed again here, from the files of the records."""

import json
import re
import statistics
from collections import Counter, defaultdict

import numpy as np
import pytest
import yaml
from analysis_runs import heldout_losses, similarity_map, write
from scipy.stats import t
from test_pair_penalty import logged

from analysis.comparison.results import Results
from analysis.reports import answers


def final_scores(folder, metric):
    """Scores by backbone, route with its rate, step and seed, straight from the files of TREAD and dense runs."""
    table = defaultdict(dict)
    for run in sorted(path.parent for path in folder.glob("*/summary.json")):
        summary = json.loads((run / "summary.json").read_text())
        routing = yaml.safe_load((run / "config.yaml").read_text())["routing"]
        if [routing[key] for key in ("selection", "reinsert", "remove")] != ["random", "identity", "start"]:
            continue
        for line in map(json.loads, (run / "scores.jsonl").read_text().splitlines()):
            if line["metric"] == metric and line["step"] == summary["step"]:
                key = summary["backbone"], summary["route"], summary["step"]
                table[key].setdefault(summary["seed"], line["value"])
    return table


def difference(dense, routed):
    """Mean and bounds of the paired 95 % t-interval."""
    values = [routed[seed] - dense[seed] for seed in sorted(dense.keys() & routed.keys())]
    mean, n = statistics.mean(values), len(values)
    half = t.ppf(0.975, n - 1) * statistics.stdev(values) / n**0.5
    return mean, mean - half, mean + half, n


def tally(intervals):
    """Better, worse and neither, for a score whose lower end is better."""
    verdicts = Counter()
    for _, low, high, _ in intervals:
        verdicts["better" if high < 0 else "worse" if low > 0 else "neither"] += 1
    return (
        f"of {len(intervals)} comparisons with dense runs after equal steps, routed models are significantly better "
        f"in {verdicts['better']}, significantly worse in {verdicts['worse']}, and not significantly different in "
        f"{verdicts['neither']}"
    )


FD = "FD-2K (fashion-classifier)"


def test_the_rates_are_those_of_the_records(records):
    results = records("ablations")
    scores = final_scores(results.folder, FD)
    text = answers.make("rate", results)
    assert "In the paper, a rate of 0.5 is the best: FID 21.34 against 43.47 without a route." in text
    intervals = []
    for rate, name in ((0.25, "2-8@0.25"), (0.5, "2-8"), (0.75, "2-8@0.75")):
        mean, low, high, n = difference(scores["dit", "none", 1500], scores["dit", name, 1500])
        intervals.append((mean, low, high, n))
        assert n == 3 and f"{rate:g} {mean:+.2f} [{low:+.2f}, {high:+.2f}]: " in text
    assert tally(intervals) in text
    # Seven of twelve blocks are routed; attention saves a little more than its share of tokens.
    shares = re.findall(r"(\d\.\d\d) at rate (\d\.\d+)", text)
    for share, rate in shares:
        assert float(share) == pytest.approx(1 - 7 / 12 * float(rate), abs=0.03)
    assert len(shares) == 3


def test_the_placements_are_those_of_the_records(records):
    results = records("placement")
    scores = final_scores(results.folder, FD)
    text = answers.make("placement", results)
    assert "route 2-8 is the best of 16: FID 28.02 against 49.89 without a route" in text
    intervals = []
    for backbone in ("mamba", "rwkv"):
        means = {}
        for route in ("6-8", "4-8", "2-8", "0-10"):
            routed = scores[backbone, route, 1500]
            means[route] = statistics.mean(routed.values())
            intervals.append(difference(scores[backbone, "none", 1500], routed))
        best, worst = min(means, key=means.get), max(means, key=means.get)
        assert f"best {best} ({means[best]:.2f}), worst {worst} ({means[worst]:.2f})" in text
    assert tally(intervals) in text
    assert "skips 4.0 blocks, the other 9.0" in text  # 6-8 and 4-8: 3 and 5; 2-8 and 0-10: 7 and 11


def test_the_main_answer_is_that_of_the_records(records):
    results = records("runs")
    text = answers.make("main", results)
    assert "In the paper, DiT-B/2 improves from FID 43.47 to 21.34" in text
    scores = final_scores(results.folder, FD)
    intervals = []
    for backbone in ("dit", "mamba", "rwkv"):
        dense, routed = scores[backbone, "none", 3000], scores[backbone, "2-8", 3000]
        mean, low, high, n = difference(dense, routed)
        intervals.append((mean, low, high, n))
        common = dense.keys() & routed.keys()
        before, after = (statistics.mean(part[seed] for seed in common) for part in (dense, routed))
        assert f"{FD} {before:.2f} and {after:.2f}, {mean:+.2f} [{low:+.2f}, {high:+.2f}] (n={n}, " in text
    digits = final_scores(results.folder, "FD-200 (digits-classifier)")
    for backbone in ("dit", "rwkv"):
        intervals.append(difference(digits[backbone, "none", 2000], digits[backbone, "2-8", 2000]))
    assert tally(intervals) in text and "(3 more have fewer than 3 paired seeds)" in text


def test_the_response_to_guidance_is_that_of_the_records(records):
    results = records("guidance")
    text = answers.make("guidance", results)
    assert "from FID 4.89 to 2.57" in text and "to 2.14. " in text
    values = defaultdict(lambda: defaultdict(list))
    for run in sorted(results.folder.iterdir()):
        kind = "dense" if "_none_" in run.name else "routed"
        backbone = run.name.split("-")[0]
        stored = [json.loads(line) for line in (run / "scores.jsonl").read_text().splitlines()]
        for path in sorted((run / "evaluations").glob("*.json")):
            stored += json.loads(path.read_text())["scores"]
        seen = {line["guidance"]: line["value"] for line in stored if line["metric"] == FD and line["step"] == 3000}
        for guidance, value in seen.items():
            values[backbone, kind][guidance].append(value)
    for kind in ("dense", "routed"):
        best, guided = [], []
        for backbone in ("dit", "mamba", "rwkv"):
            means = {name: statistics.mean(v) for name, v in values[backbone, kind].items()}
            unguided = next(means[name] for name in means if name == "none scale=1.0")
            scales = [means[name] for name in means if name.startswith("cfg scale=")]
            best.append(min(scales) / unguided)
            (weak,) = (means[name] for name in means if name.startswith("routed scale=1.5"))
            guided.append(weak / unguided)
        assert f"{min(best):.2f} to {max(best):.2f} ({kind})" in text
        assert f"{min(guided):.2f} to {max(guided):.2f} ({kind})" in text
    assert "(n=1-2, too few to tell)" in text


def test_similarity_is_of_the_outputs_inside_the_route_and_of_neighbours():
    # The input and four blocks; inside 1-2 is the one pair of outputs at (2, 3).
    dense = [[1.0, 0.9, 0.8, 0.7, 0.6], [0.9, 1.0, 0.8, 0.7, 0.6], [0.8, 0.8, 1.0, 0.5, 0.4]]
    dense += [[0.7, 0.7, 0.5, 1.0, 0.9], [0.6, 0.6, 0.4, 0.9, 1.0]]
    routed = np.array(dense)
    routed[2, 3] = routed[3, 2] = 0.97
    text = answers.similarity([similarity_map(dense, "none"), similarity_map(routed, "1-2")])
    before, after = (0.9 + 0.8 + 0.5 + 0.9) / 4, (0.9 + 0.8 + 0.97 + 0.9) / 4
    assert "more alike after training with it in 1 of 1 pairs" in text
    assert "dit-T/1 0.50 dense and 0.97 with route 1-2" in text
    assert f"{before:.2f} and {after:.2f})" in text
    assert "in 0 of 1 pairs" in answers.similarity([similarity_map(routed, "none"), similarity_map(dense, "1-2")])
    assert answers.similarity([similarity_map(dense, "none")]).startswith("These runs do not answer")


def test_the_relative_cost_stands_where_losses_were_logged_on_the_way(tmp_path):
    for seed in range(3):
        for route, slower in (("none", 1.0), ("2-8", 1.25 * 1.02**seed)):
            logged(write(tmp_path, "dit", route, seed), slower)
    m = 1 - 7 / 12 * 0.5 * 0.98
    assert f"relative to dense: dit-T/1 {1.275 * m:.2f} [" in answers.make("main", Results.of(tmp_path))
    # A seed that never reaches the loss leaves no mean.
    folder = next(path for path in tmp_path.iterdir() if "2-8_s2" in path.name)
    heldout_losses(folder, {50: 9.0, 400: 9.0})
    assert "dit-T/1 undecided: 1 of 3 seeds censored" in answers.make("main", Results.of(tmp_path))


@pytest.mark.parametrize("name", sorted(answers.ANSWERS))
def test_runs_without_an_answer_say_what_is_missing(name, tmp_path):
    write(tmp_path)
    assert answers.make(name, Results.of(tmp_path)).startswith("These runs do not answer this question: it needs ")

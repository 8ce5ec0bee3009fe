"""Suggesting a route from a dense model: candidates, choice and comparison by hand, then a model."""

import dataclasses

import pytest
import torch
from suite import RESULTS

from analysis import command, suggest_route
from analysis.tables import paper
from experiments.evaluation.heldout import HeldOut
from experiments.evaluation.images import split_indices


def test_candidates_are_the_sixteen_routes_of_the_paper():
    assert set(suggest_route.candidate_routes(12)) == {row["route"] for row in paper.rows("placement")}
    assert len(suggest_route.candidate_routes(12)) == 16


def test_a_route_is_suggested_where_no_other_saves_as_much_at_a_lower_loss():
    losses = {"0-2": 0.3, "6-8": 0.2, "2-8": 0.5, "0-8": 0.4}
    macs = {"0-2": 0.9, "6-8": 0.9, "2-8": 0.7, "0-8": 0.6}
    assert suggest_route.undominated(losses, macs) == {"6-8", "0-8"}


def test_a_comparison_by_hand():
    losses = {"0-2": 0.3, "6-8": 0.2, "2-8": 0.5, "0-6": 0.5001}
    trained = {"0-2": 0.22, "6-8": 0.21, "2-8": 0.25, "0-6": 0.24, "4-8": 0.2}
    result = suggest_route.rank_agreement(losses, trained)
    # Ranks 2 1 3 4 against 2 1 4 3: 1 - 6 * 2 / (4 * 15).
    assert result.routes == 4 and result.correlation == pytest.approx(0.8)
    assert (result.pairs, result.agreeing, result.tied) == (2, 1, 1)
    with pytest.raises(suggest_route.AnalysisError, match="at least 3"):
        suggest_route.rank_agreement(losses, {"0-2": 0.2})


def test_the_probe_measures_the_losses_of_both_passes_and_the_dense_one_once(monkeypatch):
    def losses(self, index, draw=0, dense=True):
        passes.append((self.config.route, dense))
        return measure(self, index, draw, dense)

    model, measure, passes = RESULTS / "models" / "dit_none.safetensors", HeldOut.losses, []
    monkeypatch.setattr(suggest_route, "candidate_routes", lambda depth: ["2-8", "7-8"])
    monkeypatch.setattr(HeldOut, "losses", losses)
    probe = suggest_route.probe(model, samples=20)
    assert passes == [("none", True), ("2-8", False), ("7-8", False)]
    data = HeldOut.open(model)
    index = split_indices(data.dataset, "test", 20)
    for route, loss in probe.losses.items():
        config = dataclasses.replace(data.config, route=route)
        with torch.inference_mode():
            both = dataclasses.replace(data, config=config).losses(index)
        assert (probe.dense, loss) == pytest.approx(tuple(map(float, both)), rel=1e-6)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [(["--samples", "0"], "--samples 0: expected a positive"), (["--trained", "README.md"], "holds no records")],
)
def test_wrong_options_are_refused_before_a_loss_is_measured(words, sentence, monkeypatch, capsys):
    monkeypatch.setattr(suggest_route, "probe", None)
    monkeypatch.chdir(RESULTS)
    assert command.main(["suggest-route", "models/dit_none.safetensors", *words]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.slow
def test_a_bundled_dense_model(capsys):
    model = str(RESULTS / "models" / "dit_none.safetensors")
    words = ["suggest-route", model, "--samples", "100", "--trained", str(RESULTS / "fig8.tar.gz")]
    assert command.main(words) == 0
    text = capsys.readouterr().out
    assert "rank correlation with 16 trained routes" in text
    (row,) = (line for line in text.splitlines() if line.startswith("| 2-8 |"))
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[1:3] == ["7", "0.69x"]
    (dense,) = (line for line in text.splitlines() if line.startswith("| none |"))
    assert float(cells[3]) > float(dense.split("|")[4])

"""The claims ledger: its fields, the page made from it, and commands that really compose."""

import importlib
import re
import shlex
from pathlib import Path

import pytest
from small import ROOT

from analysis import claims, command, tables
from analysis.tables import paper
from analysis.tables.table import markdown
from experiments import config
from routing.errors import UserError
from sweeps import command as sweeps_command

LEDGER = claims.read_ledger()
COMMANDS = sorted({text for claim in LEDGER.claims.values() for text in claim.commands})


def test_the_page_is_up_to_date():
    page = claims.PAGE.read_text(encoding="utf-8")
    assert page == claims.render(LEDGER), "type python -m analysis.claims"


@pytest.mark.slow
@pytest.mark.parametrize("text", COMMANDS)
def test_every_command_composes(text, tmp_path, tmp_path_factory, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # A dry run looks for the files of Fashion-MNIST: empty ones stand for them.
    folder = tmp_path_factory.mktemp("fashion")
    for part in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (folder / f"{part}-ubyte").touch()
    words = shlex.split(text.replace("FOLDER", str(folder)))
    if words[:2] == ["python", "experiments/run.py"]:
        config.load(words[2:])
        return
    assert words[:4] == ["python", "-m", "sweeps", "launch"], text
    code = sweeps_command.main([*words[3:], "--dry-run"])
    printed = capsys.readouterr()
    # The plan is composed and printed before ImageNet's latents, which nobody has here, are missed.
    if "data.path=LATENTS" in words:
        assert code == 2 and printed.err.startswith("error: LATENTS is no folder"), printed.err
    else:
        assert code == 0, printed.err
    count = re.search(r"(\d+) runs on cluster=", printed.out)
    assert int(count[1]) > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", LEDGER.claims)
def test_our_numbers_have_a_command_that_parses(key):
    ours = LEDGER.claims[key].ours
    if ours.command is None:
        assert ours.verdict == "not tested"
        return
    words = shlex.split(ours.command)
    assert words[:2] == ["python", "-m"]
    if words[2] == "analysis":
        command.parser().parse_args(words[3:])
    else:
        assert (ROOT / (words[2].replace(".", "/") + ".py")).is_file()


WITH_DIFFERENCES = [key for key, claim in LEDGER.claims.items() if " +- " in claim.ours.result]


@pytest.mark.parametrize("key", WITH_DIFFERENCES)
def test_our_differences_are_those_of_the_records(key, records):
    """Each difference with its interval stands in the table that the claim's command prints."""
    ours = LEDGER.claims[key].ours
    words = shlex.split(ours.command)
    printed = ""
    for record in ours.records:
        if words[2].startswith("results.studies."):
            printed += importlib.import_module(words[2]).table(words[3]).to_string()
        else:
            archive = Path(record).name.removesuffix(".tar.gz")
            printed += markdown(tables.make(words[words.index("--only") + 1], records(archive)))
    differences = re.findall(r"([+-]\d+\.\d+) \+- (\d+\.\d+)", ours.result)
    assert differences
    for mean, half in differences:
        assert re.search(re.escape(f"{mean} \u00b1 {half}") + r"(?![\d.])", printed), (mean, half)


def test_published_numbers_agree_with_those_that_tables_print():
    """paper.yaml was typed from the same tables on its own: the oracle of the main rows."""
    published = {}
    for family in ("dit", "sit"):
        for label, number in LEDGER.claims[f"tread-main-{family}"].values.items():
            published[f"{'DiT' if family == 'dit' else 'SiT'}-{label}"] = number
    rows = [row for row in paper.rows("main") if row["model"].startswith(("DiT", "SiT"))]
    assert len(rows) == 8
    for row in rows:
        assert published[f"{row['model']} dense"] == row["dense"]
        assert published[f"{row['model']} routed"] == row["tread"]
    for row in paper.rows("rate"):
        assert LEDGER.claims["tread-rate"].values[f"rate {row['rate']:g}"] == row["fid"]
    deltas = {row["route"]: row["delta"] for row in paper.rows("placement")}
    for route, delta in LEDGER.claims["tread-placement"].values.items():
        assert deltas[route] == delta


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("    metric: ", "    metrics: ", "unknown key claims.*did you mean metric"),
        ("    paper: ", "    paper: un", "expected one of tread, "),
        ("verdict: not tested", "verdict: agrees", "expected ours.records and ours.command"),
        ("records: [", "records: [results/none.tar.gz, ", "ours.records=results/none.tar.gz"),
        ("- source: ", "- sorce: x\n        source: ", "reproductions.0..sorce"),
    ],
)
def test_a_wrong_field_is_named(old, new, message, tmp_path):
    path = tmp_path / "claims.yaml"
    path.write_text(claims.LEDGER.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")
    with pytest.raises(UserError, match=message):
        claims.read_ledger(path)

"""The claims ledger: published numbers about token routing, checked, and the page made from them.

`results/claims.yaml` holds one entry per published claim: where it stands, what was measured and
how, what confounds it, who repeated it, the commands of this suite that would test it, and what our
own runs gave. `python -m analysis.claims` checks the file and writes `results/claims.md`.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import MinLen

from analysis.errors import AnalysisError
from analysis.tables.table import markdown_escape, markdown_rows
from backbones.parsing import Malformed, yaml_of
from backbones.validation import validate
from experiments.runtime.command import ROOT, run_command
from experiments.runtime.files import atomic_write

LEDGER = ROOT / "results" / "claims.yaml"
PAGE = ROOT / "results" / "claims.md"
Text = Annotated[str, MinLen(1)]
Verdict = Literal["agrees", "disagrees", "undecided", "not tested"]


@dataclass(frozen=True)
class Paper:
    """Where claims were published."""

    title: Annotated[str, MinLen(1), "Title, venue and year."]
    link: Annotated[str, MinLen(1), "arXiv page, repository or issue."]


@dataclass(frozen=True)
class Reproduction:
    """One attempt by others to obtain a claim's result."""

    source: Annotated[str, MinLen(1), "Who, and where it is published."]
    result: Annotated[str, MinLen(1), "What came out, with its setting."]


@dataclass(frozen=True)
class OurResult:
    """What the runs of this repository gave."""

    verdict: Annotated[Verdict, "Whether our runs agree with the claim, at their scale."]
    result: Annotated[str, MinLen(1), "Numbers with n, or the reason why there are none."]
    records: Annotated[tuple[Text, ...], "Archives in results/ that hold the runs."] = ()
    command: Annotated[str | None, "Computes the numbers from the records."] = None

    def check_consistency(self) -> None:
        """Refuse a verdict without records, and records that do not exist.

        Raises:
            AnalysisError: Naming the verdict or the record.
        """
        if self.verdict == "not tested":
            if self.records:
                raise AnalysisError("ours.verdict=not tested: expected no ours.records")
            return
        if not self.records or self.command is None:
            raise AnalysisError(
                f"ours.verdict={self.verdict}: expected ours.records and ours.command"
            )
        for record in self.records:
            if not (ROOT / record).is_file():
                raise AnalysisError(f"ours.records={record}: expected a file of this repository")


@dataclass(frozen=True)
class Claim:
    """One published claim about token routing."""

    paper: Annotated[str, MinLen(1), "Key of `papers`."]
    table: Annotated[str, MinLen(1), "Table, figure or page, with its version."]
    setting: Annotated[str, MinLen(1), "Model, data, route and training length."]
    metric: Annotated[str, MinLen(1), "Metric with its number of samples."]
    values: Annotated[dict[str, float], "Published numbers by label; empty if none was given."]
    claim: Annotated[str, MinLen(1), "What is claimed, in one sentence."]
    protocol: Annotated[str, MinLen(1), "Sampler, guidance, baseline, seeds."]
    commands: Annotated[tuple[Text, ...], MinLen(1), "Commands here that would test it."]
    ours: Annotated[OurResult, "What our runs gave."]
    confounds: Annotated[tuple[Text, ...], "Other explanations of the numbers."] = ()
    reproductions: tuple[Reproduction, ...] = ()


@dataclass(frozen=True)
class Ledger:
    """All papers and claims, by key, in the order of the file."""

    papers: dict[str, Paper]
    claims: dict[str, Claim]


def read_ledger(path: Path = LEDGER) -> Ledger:
    """Return the checked ledger.

    Raises:
        AnalysisError: The file is no YAML mapping of `papers` and `claims`, a claim names an
            unknown paper, or a verdict stands without records.
        UserError: A field is missing, unknown or of another type.
    """
    try:
        document = yaml_of(path.read_text(encoding="utf-8"), path.name)
    except (OSError, UnicodeDecodeError, Malformed) as error:
        raise AnalysisError(f"{path} cannot be read as a claims ledger: {error}") from None
    if not isinstance(document, Mapping) or set(document) != {"papers", "claims"}:
        raise AnalysisError(f"{path}: expected the two keys papers and claims")
    papers = {}
    for key, entry in document["papers"].items():
        papers[key] = validate(Paper, entry, f"papers.{key}.")
    claims = {}
    for key, entry in document["claims"].items():
        claims[key] = validate(Claim, entry, f"claims.{key}.")
        for index, item in enumerate(entry.get("reproductions", ())):  # for their unknown keys
            validate(Reproduction, item, f"claims.{key}.reproductions[{index}].")
        if claims[key].paper not in papers:
            raise AnalysisError(
                f"claims.{key}.paper={claims[key].paper}: expected one of {', '.join(papers)}"
            )
    return Ledger(papers, claims)


# --- the page -------------------------------------------------------------------------------------

_HEAD = """\
# Which claims about token routing have been reproduced?

Published numbers about routing, who tried to repeat them, and what our own runs gave. Ours are
models of about a million parameters on small pictures, trained on CPUs: *agrees* and *disagrees*
are about the direction at that scale, and a disagreement does not refute a result at the paper's.
This page is generated from [claims.yaml](claims.yaml) by `python -m analysis.claims`;
[how to add a row](../CONTRIBUTING.md#add-a-run-or-a-claim).

In commands, `LATENTS` and `FOLDER` stand for your data, and `RECORDS` for the folder that `tar -xf`
makes of the archive beside our result. Append `--dry-run` (sweeps) or `dry=true` (runs) to see what
a command would do.
"""


def render(ledger: Ledger) -> str:
    """Return the page as Markdown: a table of all claims, then every claim in full."""
    rows = []
    for key, claim in ledger.claims.items():
        summary = f"[{key}](#{key}): {markdown_escape(claim.claim)}"
        count = str(len(claim.reproductions) or "no")
        metric = markdown_escape(claim.metric)
        rows.append([summary, metric, count, claim.ours.verdict])
    heads = ["Claim", "Metric", "Attempts by others", "Our runs"]
    lines = [f"{_HEAD}\n{markdown_rows(heads, rows, numeric=[2])}".rstrip()]
    for paper_key, paper in ledger.papers.items():
        lines += ["", f"## {markdown_escape(paper.title)}", "", f"<{paper.link}>"]
        for key, claim in ledger.claims.items():
            if claim.paper == paper_key:
                lines += ["", *_section(key, claim)]
    return "\n".join(lines) + "\n"


def _section(key: str, claim: Claim) -> list[str]:
    values = []
    for label, number in claim.values.items():
        values.append(f"{label} {number:g}")
    published = "; ".join(values) or "no number was published"
    lines = [
        f"### {key}",
        "",
        f"{markdown_escape(claim.claim)}",
        "",
        f"- **Where**: {markdown_escape(claim.table)}",
        f"- **Setting**: {markdown_escape(claim.setting)}",
        f"- **Published** ({markdown_escape(claim.metric)}): {markdown_escape(published)}",
        f"- **Protocol**: {markdown_escape(claim.protocol)}",
    ]
    for text in claim.confounds:
        lines.append(f"- **Confound**: {markdown_escape(text)}")
    for item in claim.reproductions:
        lines.append(
            f"- **Attempt by** {markdown_escape(item.source)}: {markdown_escape(item.result)}"
        )
    ours = f"- **Our runs** ({claim.ours.verdict}): {markdown_escape(claim.ours.result)}"
    for record in claim.ours.records:
        ours += f" [{Path(record).name}]({Path(record).relative_to('results')})"
    lines += [ours, "", "```bash"]
    lines += [f"{command}   # would test it" for command in claim.commands]
    if claim.ours.command is not None:
        lines.append(f"{claim.ours.command}   # our numbers, from the records")
    return [*lines, "```"]


def _command(words: list[str]) -> int:
    if words:
        raise AnalysisError(f"{' '.join(words)}: python -m analysis.claims takes no arguments")
    ledger = read_ledger()
    atomic_write(PAGE, render(ledger))
    print(f"{PAGE}  {len(ledger.claims)} claims of {len(ledger.papers)} sources")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Check the ledger and write its page; return the exit code (2 for a user's mistake)."""
    return run_command(_command, arguments)


if __name__ == "__main__":
    sys.exit(main())

"""Findings of the conformance kit, and the table that it ends with."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

PASS, FAIL, NOT_APPLICABLE = "pass", "FAIL", "n/a"
Judgement = tuple[str, str]  # one of these, and the evidence
_WIDTH = 100


@dataclass(frozen=True)
class Finding:
    """The result for one property.

    Attributes:
        name: The property.
        result: `pass`, `FAIL` or `n/a` (not applicable).
        evidence: What was seen, with numbers.
    """

    name: str
    result: str
    evidence: str


@dataclass(frozen=True)
class Report:
    """All findings about one model; `print(report)` prints a table.

    Attributes:
        findings: One for each property, in the order of the table.
    """

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.failed

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the properties that failed."""
        return tuple(finding.name for finding in self.findings if finding.result == FAIL)

    def __getitem__(self, name: str) -> Finding:
        """Return the finding of a property; a `KeyError` if there is none of that name."""
        return {finding.name: finding for finding in self.findings}[name]

    def __str__(self) -> str:
        name_width = max(len(finding.name) for finding in self.findings) + 2
        result_width = len("result") + 2
        indent = " " * (name_width + result_width)
        lines = ["property".ljust(name_width) + "result".ljust(result_width) + "evidence"]
        for finding in self.findings:
            start = finding.name.ljust(name_width) + finding.result.ljust(result_width)
            text = textwrap.fill(
                start + finding.evidence, _WIDTH, subsequent_indent=indent, break_long_words=False
            )
            lines.append(text)
        results = [finding.result for finding in self.findings]
        counts = (
            f"{results.count(PASS)} passed, {results.count(FAIL)} failed, "
            f"{results.count(NOT_APPLICABLE)} not applicable"
        )
        return "\n".join((*lines, counts))

"""The models of the compatibility table pass the conformance kit, and the pages say what it gave."""

from __future__ import annotations

import re

import pytest
from checked_models import ours
from small import ROOT
from test_check import PAGE, row_of

import routing

pytest.importorskip("diffusers")
pytest.importorskip("timm")

from foreign_models import MODELS, attached

CHECKED = {f"our {name}": ours(name) for name in ("dit", "mamba", "rwkv")}
CHECKED |= {name: attached(name) for name in MODELS}


@pytest.mark.parametrize("name", CHECKED)
def test_models_pass_and_the_page_says_so(name):
    report = routing.check(CHECKED[name])
    assert report.ok, str(report)
    assert row_of(name, report) in PAGE.read_text().splitlines()


def test_the_table_of_what_can_be_attached_to_is_what_was_checked():
    text = (ROOT / "docs" / "attach.md").read_text().split("| model | attach to | text |")[1]
    names = re.findall(r"^\| ([^|]+?) \| (?:the model|`model)", text, re.MULTILINE)
    assert names == list(MODELS)

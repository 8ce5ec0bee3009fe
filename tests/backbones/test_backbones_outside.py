"""Families that are not in the package: a file that TREAD_BACKBONES names."""

import dataclasses
import inspect
import subprocess
import sys

import pytest
import torch
from small import ROOT
from torch import nn

import backbones
from backbones import BackboneError, registry
from backbones.cost import cost
from backbones.layers import Block
from backbones.options import BlockCost, ModelConfig, Spec
from experiments.config import load

OWN = """
from dataclasses import dataclass
from backbones.registry import BlockCost, Spec, register
@dataclass(frozen=True)
class Options:
    taps: int = 3
register(Spec("mine", Options, lambda *_: BlockCost(1, 1, lambda n: n, 1), f"{__name__}:Mine"))
"""


def python(code, **environment):
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def test_a_registered_family_is_composed_from_its_options_defaults_and_is_in_the_help(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    code = """
import sys
from experiments.config import load
from experiments.config.help import help_text
from routing.errors import UserError
options = load(["backbone=mine", "backbone.taps=5", "route=2-8"]).backbone
print(options.name, options.family.taps, options.attention, options.condition)
print("backbone=mine" in help_text("all") + help_text("backbone"), "backbone.taps=3" in help_text("backbone=mine"))
try:
    load(["backbone=mine", "backbone.tap=5"])
except UserError as error:
    print("did you mean backbone.taps?" in str(error))
print("torch" in sys.modules)
"""
    printed = python(code, TREAD_BACKBONES=str(tmp_path / "mine.py"))
    assert printed.splitlines() == ["mine 5 0 adaln", "True True", "True", "False"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.py", None, "there is no such Python file"),
        ("mine.txt", OWN, "there is no such Python file"),
        ("json.py", OWN, "Python has another module 'json'"),
        ("mine.py", "x = 1\ndef broken(:\n", "cannot be imported: {path}, line 2: SyntaxError: invalid syntax"),
        ("mine.py", "def f():\n    raise KeyError('taps')\n\n\nf()\n", "{path}, line 2: KeyError: 'taps'"),
        ("mine.py", "import sys\nsys.exit('not here')\n", "{path}, line 2: SystemExit: not here"),
    ],
)
def test_a_file_that_cannot_be_imported_is_refused_with_its_line(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    code = "from backbones.registry import names; names()"
    assert message.format(path=path) in python(code, TREAD_BACKBONES=str(path))


def test_an_option_that_the_model_would_keep_is_refused():
    arguments = {field.name for field in dataclasses.fields(ModelConfig)}
    for function in (backbones.create, cost):
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind is not parameter.VAR_KEYWORD:
                arguments.add(parameter.name)
    assert arguments | {"router"} == registry.TAKEN
    for name in registry.TAKEN:
        options = dataclasses.make_dataclass("Options", [(name, int, 3)])
        with pytest.raises(BackboneError, match=f"has an option {name!r}.*rename it"):
            registry.register(registry.Spec("mine", options, lambda *_: None, "mine:Mine"))


def test_a_wrong_count_of_parameters_is_refused(monkeypatch):
    spec = registry.find("dit")
    half = dataclasses.replace(spec, cost=lambda *a: dataclasses.replace(spec.cost(*a), params=10))
    monkeypatch.setitem(registry._SPECS, "dit", half)
    message = "block 0 of dit has [0-9]+ parameters where its block_cost counts 10"
    with pytest.raises(BackboneError, match=message):
        backbones.create("dit", "T/2", depth=2)


@dataclasses.dataclass(frozen=True)
class WindowOptions:
    window: int = 2


class WindowBlock(Block):
    """A learned vector for each window of the grid."""

    def __init__(self, size, index, grid, options):
        super().__init__(index)
        self.vectors = nn.Parameter(torch.zeros(windows(grid, options), size.width))


def windows(grid, options):
    return grid[0] * grid[1] // options.window**2


def window_cost(size, index, grid, options):
    return BlockCost(windows(grid, options) * size.width, 0, lambda tokens: tokens * windows(grid, options), 0)


def check_window(size, grid, options):
    if any(side % options.window for side in grid):
        raise BackboneError(f"window={options.window}: expected a divisor of {grid[0]} and {grid[1]} patches")


@pytest.fixture
def window_family(monkeypatch):
    monkeypatch.setattr(registry, "_SPECS", {**registry._SPECS})
    spec = Spec("windows", WindowOptions, window_cost, f"{__name__}:WindowBlock", check_window)
    backbones.register(spec)
    return spec


def test_a_family_keeps_its_name(window_family):
    assert "windows" in backbones.names()
    backbones.register(window_family)  # as when its file is imported again
    with pytest.raises(BackboneError, match="registered already by .*:WindowBlock"):
        backbones.register(dataclasses.replace(window_family, block="elsewhere:Block"))


def test_parameters_macs_and_options_may_depend_on_the_grid(window_family):
    for side, count in ((8, 4), (16, 16)):
        arguments = {"name": "windows", "size": "T/2", "depth": 3, "input_size": side}
        params = sum(parameter.numel() for parameter in backbones.create(**arguments).parameters())
        count_of_family = cost(**arguments)
        assert params == count_of_family.params
        assert count_of_family.macs_dense - count_of_family.macs_dense_no_attention == 3 * (side // 2) ** 2 * count
    message = "window=3: expected a divisor of 4 and 4 patches"
    with pytest.raises(BackboneError, match=message):
        backbones.create("windows", "T/2", input_size=8, window=3)
    with pytest.raises(BackboneError, match=message):
        load(["backbone=windows", "backbone.window=3", "data=digits", "size=T/2"])

"""The README and the pages of docs/ say what is true: trees, paths, commands, keys, links, examples."""

import ast
import itertools
import os
import re
import subprocess
import sys
import tomllib

import documents
import pytest
import yaml
from documents import PAGES, label
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from small import ROOT

from backbones.validation import fields_of
from experiments import config, evaluate, export, prepare, sample
from experiments.config import groups
from experiments.config.compose import compose
from experiments.runtime.nested import flatten

PACKAGES = ("routing", "backbones", "experiments", "sweeps", "analysis")
# What stands for something of the reader's: a name, or a run that has to be there.
PLACES = ("NAME", "RUN")
pages = pytest.mark.parametrize("page", PAGES, ids=label)


# --- the tree ------------------------------------------------------------------------------------


def test_the_tree_shows_every_room():
    shown, there = documents.tree(), documents.rooms()
    hidden = {f"{name}/" for name in ("tests", "docs", "examples", "results")}
    assert there - shown == set(), "not shown"
    gone = {path for path in shown - hidden if not (ROOT / path).is_dir()}
    assert gone == set(), "not there"


def test_contributing_lists_every_file():
    page = ROOT / "CONTRIBUTING.md"
    head, rest = page.read_text(encoding="utf-8").split("<!-- files -->\n")
    listed, tail = rest.split("<!-- end -->")
    if os.environ.get("REGENERATE"):
        page.write_text(f"{head}<!-- files -->\n{documents.files()}<!-- end -->{tail}")
    else:
        assert listed == documents.files(), "type make surface"


# --- paths, commands, keys -----------------------------------------------------------------------


@pages
def test_paths_exist(page):
    roots = "|".join((*PACKAGES, "docs", "tests", "examples"))
    text = page.read_text(encoding="utf-8")
    for found in re.findall(rf"(?<![\w./-])((?:{roots})/[\w./*-]*)", text):
        path = found.rstrip(".")
        if not any(word in path for word in PLACES):
            assert list(ROOT.glob(path)) if "*" in path else (ROOT / path).exists(), path


@pages
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), target


def train(words):
    if "--help" in words:
        return
    if "-m" in words:  # Hydra's own sweep: each value of every list
        words = [word for word in words if word != "-m" and not word.startswith("hydra/")]
        lists = [
            [f"{word.split('=')[0]}={one}" for one in word.split("=")[1].split(",")]
            for word in words
        ]
        for run in itertools.product(*lists):
            config.load(run)
        return
    config.load([word for word in words if word != "..." and word.split("=")[-1] not in PLACES])


def bench(words):
    from experiments.benchmark.bench_options import BenchOptions, parse

    parse(words, BenchOptions)


def sweep(words):
    from sweeps.command import parser

    if len(words) == 1 and words != ["list"]:  # a command that is spoken of
        words = [*words, "main_table"]
    given = parser().parse_args(words)
    if given.command != "list" and given.grid and given.grid != "mygrid":
        assert (ROOT / "sweeps" / "grids" / f"{given.grid}.yaml").is_file(), given.grid


def analyse(words):
    from analysis.command import parser

    parser().parse_args(words)


def positional(made):
    return lambda words: None if words == ["--help"] else made.parse_intermixed_args(words)


SCRIPTS = {
    "experiments/run.py": train,
    "experiments/sample.py": positional(sample.parser()),
    "experiments/evaluate.py": positional(evaluate.parser()),
    "experiments/export.py": positional(export.parser()),
    "experiments/prepare.py": positional(prepare.parser()),
    "experiments/bench.py": bench,
}
MODULES = {"sweeps": sweep, "analysis": analyse}


def check(words):
    """Parse one command as the program itself would."""
    if words[0] == "make":
        targets = re.findall(r"^([a-z0-9 -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        targets = " ".join(targets).split()
        assert all(word in targets for word in words[1:] if "=" not in word), words
        return
    if words[0] in ("torchrun", "accelerate"):
        script = next((k for k, word in enumerate(words) if word.endswith(".py")), None)
        if script is None:
            return  # launchers' own flags
        words = ["python", *words[script:]]
    if words[1:2] == ["-m"]:
        if words[2] in MODULES:
            MODULES[words[2]](words[3:])
        elif "." in words[2]:
            module = ROOT / words[2].replace(".", "/")
            assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file(), words
        else:
            assert words[2] in ("pytest", "mkdocs", "pip", "twine"), words
    else:
        assert (ROOT / words[1]).is_file(), words[1]
        if words[1] in SCRIPTS:
            SCRIPTS[words[1]](words[2:])


@pages
def test_commands_parse(page):
    for words in documents.commands(page):
        try:
            check(words)
        except (SystemExit, ValueError) as error:
            pytest.fail(f"{' '.join(words)}: {error}")


def known_keys():
    keys = set(flatten(compose([])))
    for group in config.GROUPS[:6]:
        for name in config.names(group):
            for options in groups.option_classes(group, name):
                keys |= {f"{group}.{key}" for key in fields_of(options)}
    for path in (ROOT / "sweeps" / "resources").glob("*.yaml"):
        keys |= {f"cluster.{key}" for key in yaml.safe_load(path.read_text())}
    return keys


@pages
def test_keys_exist(page):
    keys = known_keys()
    prefixes = {key.split(".")[0] for key in keys if "." in key}
    for code in [*documents.spans(page), *documents.blocks(page, "bash")]:
        for group, key in re.findall(r"(?<![\w./])([a-z]+)\.([a-z_]+)=", code):
            assert group in prefixes and f"{group}.{key}" in keys, f"{group}.{key}="
        for name, value in re.findall(r"(?<![\w./])([a-z]+)=([a-z][a-z0-9_,|-]*)(?![\w.]*\()", code):
            if name in config.GROUPS:
                for one in re.split(r"[,|]", value):
                    assert one in config.names(name), f"{name}={one}"


# --- examples, the site, the order of imports ----------------------------------------------------


@pytest.mark.parametrize(
    ("page", "source"),
    [
        (page, text)
        for page in PAGES
        for text in documents.blocks(page, "python")
        if "import" in text
    ],
    ids=lambda value: label(value) if hasattr(value, "parts") else "",
)
def test_examples_run(page, source, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    printed = "".join(re.findall(r"print\(.*?\) +# (.+)", source))
    assert printed in done.stdout


def test_every_page_is_in_the_menu():
    text = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        assert str(page.relative_to(ROOT / "docs")) in text, page


def test_every_backbone_has_a_page():
    from backbones import names

    text = "".join(page.read_text() for page in (ROOT / "docs" / "backbones").glob("*.md"))
    for name in names():
        assert f"`backbone={name}`" in text, name


def imported(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("package", PACKAGES[:4])
def test_imports_run_one_way(package):
    """What the analysis may import is in test_analysis_imports.py."""
    later = set(PACKAGES[PACKAGES.index(package) + 1 :])
    for path in (ROOT / package).rglob("*.py"):
        wrong = later & set(imported(path))
        if path.stem.startswith("predict"):  # a prediction is an analysis of the pilot's runs
            wrong -= {"analysis"}
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_constraints_pin_every_dependency_within_its_range():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and line[0] != "#")
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    wanted = [
        *project["dependencies"],
        *itertools.chain(*project["optional-dependencies"].values()),
    ]
    # The suite's own extras, and what only builds on a CUDA machine.
    apart = ("tread-suite", "mamba-ssm", "causal-conv1d")
    for requirement in map(Requirement, wanted):
        if requirement.name not in apart:
            pin = pins[canonicalize_name(requirement.name)]
            assert pin in requirement.specifier and "+" not in pin, requirement


def test_the_workflow_runs_nothing_of_a_change_as_root_and_nothing_that_can_move():
    text = (ROOT / ".github/workflows/ci.yml").read_text()
    flow = yaml.safe_load(text)
    assert flow["permissions"] == {"contents": "read"}
    for line in re.findall(r"uses: (.*)", text):
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line
    for step in flow["jobs"]["test"]["steps"]:
        for line in step.get("run", "").splitlines():
            assert "sudo" not in line or not re.search(r"[.]ci|make|python|\$|\./", line), line

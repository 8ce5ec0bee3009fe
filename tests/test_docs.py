"""README.md, CONTRIBUTING.md and docs/: paths and links exist, commands parse, keys exist, examples run."""

import functools
import itertools
import re
import tomllib

import documents
import pytest
import yaml
from documents import PAGES, label
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from small import ROOT
from suite import DATA

from analysis import command as analysis_command
from backbones import names
from backbones.cost import cost
from backbones.options.family import KERNELS
from experiments import config, evaluate, export, prepare, sample
from experiments.benchmark import bench_options
from sweeps import command as sweeps_command

# Placeholders for the reader's own names.
PLACEHOLDERS = ("NAME", "RUN")
pages = pytest.mark.parametrize("page", PAGES, ids=label)


def test_the_readme_is_short():
    assert (ROOT / "README.md").stat().st_size < 6500


@pages
def test_paths_and_links_exist(page):
    text = page.read_text(encoding="utf-8")
    roots = "|".join((*documents.PACKAGES, "docs", "tests", "examples"))
    for match in re.findall(rf"(?<![\w./-])((?:{roots})/[\w./*-]*)", text):
        path = match.rstrip(".")
        if not any(word in path for word in PLACEHOLDERS):
            assert list(ROOT.glob(path)) if "*" in path else (ROOT / path).exists(), path
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), target


# --- commands and keys ---------------------------------------------------------------------------


def train(words):
    if "-m" in words:  # Hydra's own sweep: each value of every list
        lists = []
        for word in words:
            if word != "-m" and not word.startswith("hydra/"):
                key, _, values = word.partition("=")
                lists.append([f"{key}={value}" for value in values.split(",")])
        for run in itertools.product(*lists):
            config.load(run)
    elif "--help" not in words:
        config.load([word for word in words if word != "..." and word.split("=")[-1] not in PLACEHOLDERS])


def sweep(words):
    if len(words) == 1 and words != ["list"]:  # a command that is spoken of
        words = [*words, "main_table"]
    arguments = sweeps_command.parser().parse_args(words)
    if arguments.command != "list" and arguments.grid and arguments.grid != "mygrid":
        assert (ROOT / "sweeps" / "grids" / f"{arguments.grid}.yaml").is_file(), arguments.grid


def parsed_by(parser):
    return lambda words: None if words == ["--help"] else parser.parse_intermixed_args(words)


COMMANDS = {
    "experiments/run.py": train,
    "experiments/sample.py": parsed_by(sample.parser()),
    "experiments/evaluate.py": parsed_by(evaluate.parser()),
    "experiments/export.py": parsed_by(export.parser()),
    "experiments/prepare.py": parsed_by(prepare.parser()),
    "experiments/bench.py": lambda words: bench_options.parse(words, bench_options.BenchOptions),
    "sweeps": sweep,
    "analysis": analysis_command.parser().parse_args,
}


def check(words):
    """Parse one command as the program itself would."""
    if words[0] == "make":
        rules = re.findall(r"^([a-z0-9 -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        targets = " ".join(rules).split()
        assert all(word in targets for word in words[1:] if "=" not in word), words
        return
    if words[0] in ("torchrun", "accelerate"):
        script = next((k for k, word in enumerate(words) if word.endswith(".py")), None)
        if script is None:
            return  # launchers' own flags
        words = ["python", *words[script:]]
    if words[1] != "-m":
        assert (ROOT / words[1]).is_file(), words[1]
    elif "." in words[2]:
        module = ROOT / words[2].replace(".", "/")
        assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file(), words
    else:
        assert words[2] in ("sweeps", "analysis", "pytest", "mkdocs", "pip", "twine"), words
    name, *rest = words[2:] if words[1] == "-m" else words[1:]
    if name in COMMANDS:
        COMMANDS[name](rest)


@pages
def test_commands_parse(page):
    for words in documents.commands(page):
        try:
            check(words)
        except (SystemExit, ValueError) as error:
            pytest.fail(f"{' '.join(words)}: {error}")


@functools.cache
def known_keys():
    options = (DATA / "options.txt").read_text(encoding="utf-8")  # test_surface.py compares it with the code
    keys = {line.split("\t")[1] for line in options.splitlines()}
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


# --- examples and tables -------------------------------------------------------------------------

EXAMPLES = [(page, text) for page in PAGES for text in documents.blocks(page, "python") if "import" in text]


@pytest.mark.parametrize(("page", "source"), EXAMPLES, ids=[label(page) for page, _ in EXAMPLES])
def test_examples_run(page, source, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    exec(compile(source, label(page), "exec"), {"__name__": "__main__"})
    printed = "".join(re.findall(r"print\(.*?\) +# (.+)", source))
    assert printed in capsys.readouterr().out


def rows_by_first_word(text):
    """Cells of every table row, by the code word that its first cell begins with."""
    rows = re.findall(r"^\| \[?`(\w+)`(.*)\|$", text, re.MULTILINE)
    return {word: [cell.strip() for cell in rest.split(" | ")] for word, rest in rows}


def test_the_page_of_backbones_has_their_parameters_and_their_kernels_in_the_order_of_preference():
    page = (ROOT / "docs" / "backbones" / "index.md").read_text(encoding="utf-8")
    sizes, kernels = map(rows_by_first_word, page.split("## Which implementation runs"))
    for name in names():
        counts = [cost(name, size).params for size in ("S/2", "B/2", "L/2", "XL/2")]
        assert sizes[name][-4:] == [f"{count / 1e6:.1f}M" for count in counts], name
    for operation, preferred in KERNELS.items():
        on_cpu, on_cuda = (re.findall(r"`([\w-]+)`", cell) for cell in kernels[operation][2:4])
        assert on_cpu == [kernel for kernel in preferred if kernel == "native"], operation
        assert on_cuda == [kernel for kernel in preferred if kernel != "native"], operation


# --- the environment --------------------------------------------------------------------------


def test_constraints_pin_every_dependency_within_its_range():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and line[0] != "#")
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    wanted = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    # The suite's own extras, and what only builds on a CUDA machine.
    apart = ("tread-suite", "mamba-ssm", "causal-conv1d")
    for requirement in map(Requirement, wanted):
        if requirement.name not in apart:
            pin = pins[canonicalize_name(requirement.name)]
            assert pin in requirement.specifier and "+" not in pin, requirement

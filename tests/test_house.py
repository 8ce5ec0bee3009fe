"""The structure of the packages holds: no circle, few hidden imports, one name for one thing, a short step."""

import ast
import json
import subprocess
import sys
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest
from small import ROOT

PACKAGES = ("routing", "backbones", "experiments", "sweeps", "analysis")
# Bounds of what was reached; they are lowered where it gets less.
LINES, IN_FUNCTIONS, FOR_TYPES, COMMANDS = 31_936, 26, 2, 12
STEP_FILES, STEP_CHANGES = 15, 80


@cache
def modules():
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if "notebooks" not in path.parts:
                name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                found[name.removesuffix(".__init__")] = path
    return found


@cache
def imports():
    """(importing module, imported module, top | function | typing) of all own imports."""
    found = []
    for name, path in modules().items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        kinds = {}
        for node in ast.walk(tree):  # parents come before their children
            for child in ast.iter_child_nodes(node):
                kinds[child] = kinds.get(node, "top")
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                    kinds[child] = "function"
                elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                    kinds[child] = "typing"
            if isinstance(node, ast.Import):
                wanted = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path}: a relative import"
                wanted = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for text in wanted:
                while text and text not in modules():
                    text = text.rpartition(".")[0]
                if text and text != name:
                    found.append((name, text, kinds.get(node, "top")))
    return found


def test_no_module_leads_back_to_itself_however_it_is_imported():
    graph = {}
    for name, target, _ in imports():
        graph.setdefault(name, set()).add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_few_imports_are_hidden_in_functions_or_for_types():
    counts = Counter(kind for *_, kind in imports())
    assert counts["function"] <= IN_FUNCTIONS and counts["typing"] <= FOR_TYPES, counts


def test_no_two_modules_and_no_two_public_classes_share_a_name():
    stems = Counter(path.stem for path in modules().values())
    assert [s for s, n in stems.items() if n > 1 and not s.startswith("__")] == []
    classes = Counter(
        node.name
        for path in modules().values()
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [c for c, n in classes.items() if n > 1 and c not in ALIKE] == []


# Block options of a family are always called the same.
ALIKE = ("Options",)


def test_the_house_does_not_grow():
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in modules().values())
    assert lines <= LINES, lines
    assert len([p for p in (ROOT / "experiments").glob("*.py")]) <= COMMANDS


# Names the file of each call of ours between the second step of the optimizer and the third.
STEP = """
import json, runpy, sys, torch
from pathlib import Path
root, packages, files, steps = Path(sys.argv[1]), sys.argv[2].split(), [], []
update = torch.optim.AdamW.step
def called(frame, event, _):
    path = Path(frame.f_code.co_filename)
    if event == "call" and path.is_relative_to(root) and path.relative_to(root).parts[0] in packages:
        files.append(str(path.relative_to(root)))
def step(*given):
    steps.append(sys.setprofile(None))
    update(*given)
    sys.setprofile(called if len(steps) == 2 else None)
torch.optim.AdamW.step = step
sys.argv = [str(root / "experiments/run.py"), *sys.argv[3:]]
sys.path.insert(0, str(root))
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print(json.dumps(files))
"""


@pytest.mark.slow
def test_a_reader_of_one_training_step_turns_few_pages(tmp_path):
    run = ["backbone=dit", "route=2-8", "train.steps=4", "train.batch=8", "eval=none"]
    command = [sys.executable, "-c", STEP, str(ROOT), " ".join(PACKAGES), *run, f"paths.runs={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    files = json.loads(done.stdout.splitlines()[-1])
    changes = sum(a != b for a, b in zip(files, files[1:], strict=False))
    assert 0 < len(set(files)) <= STEP_FILES and 0 < changes <= STEP_CHANGES, (len(set(files)), changes)

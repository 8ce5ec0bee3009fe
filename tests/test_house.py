"""The structure of the packages holds: no circle, few hidden imports, one name for one thing."""

import ast
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter

from small import ROOT

PACKAGES = ("routing", "backbones", "experiments", "sweeps", "analysis")
# Bounds of what was reached; they are lowered where it gets less. LINES was raised five times: for the convolution's
# kernels on a GPU, the corners that three readers found, a file that readers looked for, the controls of a tail, and
# the words of other trainers.
LINES, IN_FUNCTIONS, FOR_TYPES, COMMANDS = 34_585, 26, 2, 12


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

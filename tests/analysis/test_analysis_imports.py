"""The analysis reads files: what its modules may import, and no unpickling anywhere."""

import ast
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "analysis"
FILES = sorted(path for path in FOLDER.rglob("*.py") if "notebooks" not in path.parts)
# Sizes, costs and the route grammar are plain Python tables: no torch, no training.
PLAIN = {
    "routing.errors", "routing.lazy", "routing.options", "routing.route", "routing.schedule",
    "backbones.cost", "backbones.parsing", "backbones.sizes", "backbones.validation",
}  # fmt: skip
# Roles of keys, removed keys, names of scores, what a data set says of itself.
TORCH_FREE = {
    "experiments.options.roles", "experiments.options.evaluation", "experiments.config.identity",
    "experiments.config.removed_keys", "experiments.config.schema", "experiments.data.registry",
}  # fmt: skip
# They read models.
MODELS = {"similarity.py", "guidance_scale.py", "guidance_scale_command.py", "suggest_route.py"}


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_modules_import_only_what_they_may(path):
    for name in imported(path):
        package = name.split(".")[0]
        if name in TORCH_FREE or name.startswith("experiments.runtime"):
            continue  # and the tools of every command: none imports torch
        if package in ("experiments", "sweeps"):
            assert path.name in MODELS and package == "experiments", f"imports {name}"
        if package in ("routing", "backbones") and name not in PLAIN:
            assert path.name in MODELS or path.parent.name == "figures", f"imports {name}"
        assert package not in ("pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"), f"imports {name}"

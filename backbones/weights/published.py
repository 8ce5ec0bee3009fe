"""Load weights of other projects; `NAMES` maps their names to ours.

In addition, x_embedder.proj.weight (D, C, p, p) becomes a matrix (D, C p p), and the adaLN
projections of all blocks are concatenated: block b has rows 6 D b .. 6 D (b + 1). Tables that we
compute (`pos_embed` (1, N, D), LightningDiT's `feat_rope.freqs_{cos,sin}` (N, D/heads)) are
compared with ours and dropped.

SiT and LightningDiT discard the second half of the output channels of a model with `learn_sigma`,
so those rows of the head are dropped. `OBJECTIVES` defines time input and output of each source.

A leading `module.` (data parallel), `_orig_mod.` (torch.compile) or `model.` (the EDM wrapper that
TREAD's training saves) is removed. Unknown names and missing weights are errors that list them.

From a checkpoint, the moving average is loaded: the value of a key with `ema`, `swa` or `averaged`
in its name (`ema`, `model_ema`, `state_dict_ema`), or the state of torch's `AveragedModel`; without
an average, the raw weights.
"""

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backbones.dit import rope_2d
from backbones.model import Backbone, create
from backbones.sizes import SIZES, BackboneError
from backbones.weights.files import read_safetensors, read_torch
from routing.errors import one_of, require

SOURCES = {"dit": "dit", "sit": "dit", "tread": "dit", "lightningdit": "lightningdit"}
#: Objective of the weights of each source, as options of `create_objective`: SiT and LightningDiT
#: count time from noise (0) to data (1), predict data minus noise and embed t itself. TREAD's
#: rectified flow has `{"name": "flow", "time_scale": 1.0}` instead.
OBJECTIVES: dict[str, dict[str, Any]] = {
    "dit": {"name": "ddpm", "learn_sigma": True},
    "sit": {"name": "flow", "times": "uniform", "time_scale": 1.0, "reverse": True},
    "tread": {"name": "edm"},
    "lightningdit": {"name": "flow", "cosine": 1.0, "time_scale": 1.0, "reverse": True},
}
_VELOCITY = ("sit", "lightningdit")
_PREFIX = re.compile(r"^(module\.|_orig_mod\.|model\.)+")
_PATCHES = "x_embedder.proj.weight"
_BLOCK = re.compile(r"^blocks\.(\d+)\.")
_LABELS = "y_embedder.embedding_table.weight"
_AVERAGES = {"ema", "swa", "averaged", "average"}
_RAW = ("model", "model_state_dict", "state_dict")
# Numbers of classes of common data sets: a label table with exactly that many rows probably has no
# row for the null class.
_COMMON_CLASSES = (10, 100, 200, 1000)
_LISTED = 5  # names in an error
_AXES = {_PATCHES: 4, "pos_embed": 3}
#: Published module names and ours, by family; `*` is the number of a block.
_COMMON = {
    "x_embedder.proj": "patches.project",
    "t_embedder.mlp.0": "time.mlp.0",
    "t_embedder.mlp.2": "time.mlp.2",
    "y_embedder.embedding_table": "labels.table",
    "blocks.*.attn.qkv": "stack.blocks.*.attention.qkv",
    "blocks.*.attn.proj": "stack.blocks.*.attention.proj",
    "blocks.*.adaLN_modulation.1": "modulate.project",
    "final_layer.adaLN_modulation.1": "head.modulate.project",
    "final_layer.linear": "head.project",
}
NAMES = {
    "dit": {
        **_COMMON,
        "blocks.*.mlp.fc1": "stack.blocks.*.fc1",
        "blocks.*.mlp.fc2": "stack.blocks.*.fc2",
    },
    "lightningdit": {
        **_COMMON,
        "blocks.*.mlp.w12": "stack.blocks.*.mlp.w12",
        "blocks.*.mlp.w3": "stack.blocks.*.mlp.w3",
        "blocks.*.norm1": "stack.blocks.*.norms.0",
        "blocks.*.norm2": "stack.blocks.*.norms.1",
        "blocks.*.attn.q_norm": "stack.blocks.*.attention.q_norm",
        "blocks.*.attn.k_norm": "stack.blocks.*.attention.k_norm",
        "final_layer.norm_final": "head.norm",
    },
}
_ROPE = {"feat_rope.freqs_cos": torch.cos, "feat_rope.freqs_sin": torch.sin}
_TABLES = {"dit": {"pos_embed"}, "lightningdit": {"pos_embed", *_ROPE}}


def convert(state: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Rename a published state dict of a source to ours; tables that are computed are left out.

    Raises:
        BackboneError: An unknown source, or names that are not in its table.
    """
    one_of("source of weights", source, tuple(SOURCES), BackboneError)
    family, published = SOURCES[source], _plain(state)
    converted, unknown = {}, []
    joined: dict[str, dict[int, Tensor]] = {"weight": {}, "bias": {}}
    for key, value in published.items():
        if key in _TABLES[family]:
            continue
        module, _, part = key.rpartition(".")
        block = _BLOCK.match(module)
        our_name = NAMES[family].get(_BLOCK.sub("blocks.*.", module))
        if our_name is None or part not in joined:
            unknown.append(key)
        elif block and "*" not in our_name:
            joined[part][int(block[1])] = value
        else:
            our_name = our_name.replace("*", block[1]) if block else our_name
            converted[f"{our_name}.{part}"] = value.flatten(1) if key == _PATCHES else value
    require(
        not any(key.startswith("transformer_blocks.") for key in unknown),
        f"{source} weights expected, and these have diffusers' names ({max(unknown, default='')}); "
        "import the checkpoint of the original project instead, or route diffusers' own model "
        "with routing.attach (examples/diffusers_dit.py)",
        BackboneError,
    )
    require(not unknown, f"unexpected {source} weights: {_listed(unknown)}", BackboneError)
    for part, rows in joined.items():
        shapes = {row.shape for row in rows.values()}
        if len(shapes) == 1 and sorted(rows) == list(range(len(rows))):
            converted[f"modulate.project.{part}"] = torch.cat([rows[b] for b in range(len(rows))])
    if source in _VELOCITY and _PATCHES in published:
        channels, patch = published[_PATCHES].shape[1:3]
        for key in ("head.project.weight", "head.project.bias"):
            if key in converted and len(converted[key]) == 2 * channels * patch**2:
                rows = converted[key].unflatten(0, (patch**2, 2 * channels))
                converted[key] = rows[:, :channels].flatten(0, 1)
    return converted


def _listed(names: list[str]) -> str:
    more = f", and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(sorted(names)[:_LISTED]) + more


def describe(
    state: Mapping[str, Tensor],
    source: str,
    heads: int | None = None,
    num_classes: int | None = None,
) -> dict[str, Any]:
    """Return the arguments of `backbones.create` that fit a published state dict (see `load`).

    Raises:
        BackboneError: Shape, number of heads or number of classes cannot be determined.
    """
    one_of("source of weights", source, tuple(SOURCES), BackboneError)
    family, published = SOURCES[source], _plain(state)
    needed = (_PATCHES, "pos_embed", "final_layer.linear.weight")
    lacking = [key for key in needed if key not in published]
    require(not lacking, f"{source} weights lack {', '.join(lacking)}", BackboneError)
    width, channels, patch, _ = published[_PATCHES].shape
    depth = len({key.split(".")[1] for key in published if key.startswith("blocks.")})
    side = round(published["pos_embed"].shape[1] ** 0.5) * patch
    out = published["final_layer.linear.weight"].shape[0] // patch**2
    norm = published.get("blocks.0.attn.q_norm.weight")
    named = next((s for s in SIZES.values() if (s.depth, s.width) == (depth, width)), None)
    if heads is None and norm is not None:
        heads = width // norm.shape[0]
    elif heads is None and named is not None:
        heads = named.heads
    require(
        heads is not None,
        f"{source} weights of depth {depth} and width {width} are no size of ours and do "
        "not say how many heads they have; pass heads=",
        BackboneError,
    )
    options = {"qk_norm": norm is not None}
    if family == "lightningdit":
        options["rope"] = any(key.startswith("feat_rope.") for key in published)
    return {
        "name": family,
        "size": f"{named.name if named else 'S'}/{patch}",
        "depth": depth,
        "width": width,
        "heads": heads,
        "in_channels": channels,
        "input_size": side,
        "num_classes": _class_count(published.get(_LABELS), source, num_classes),
        "learn_sigma": source not in _VELOCITY and out == 2 * channels,
        **options,
    }


def _class_count(table: Tensor | None, source: str, num_classes: int | None) -> int:
    """Return the number of classes, without the null class, of a label table (rows, D)."""
    if table is None:
        require(
            not num_classes,
            f"num_classes={num_classes}: these {source} weights have no label table",
            BackboneError,
        )
        return 0
    rows = table.shape[0]
    require(
        num_classes is not None or (rows not in _COMMON_CLASSES and rows != 1),
        f"{source} weights have a label table of {rows} rows; pass num_classes={rows} if the "
        f"model was trained with class_dropout_prob=0, which leaves out the null class, or "
        f"num_classes={rows - 1} if the last row is the null class",
        BackboneError,
    )
    require(
        num_classes is None or (type(num_classes) is int and num_classes in (rows, rows - 1)),
        f"num_classes={num_classes!r}: the label table of these {source} weights has {rows} "
        f"rows; expected {rows - 1}, or {rows} if none is the null class",
        BackboneError,
    )
    return rows - 1 if num_classes is None else num_classes


def load(
    weights: str | Path | Mapping[str, Tensor],
    source: str,
    heads: int | None = None,
    num_classes: int | None = None,
) -> Backbone:
    """Build a model from published weights.

    Args:
        weights: A state dict, or a .safetensors, .pt or .pth file with one; from a checkpoint with
            several, the moving average is taken.
        source: Project of the weights: `dit`, `sit`, `tread` or `lightningdit`.
        heads: Attention heads, if neither the weights nor the size table determine them.
        num_classes: Classes without the null class, if the label table does not determine them. For
            a model trained with `class_dropout_prob=0`, pass its number of rows; the null class is
            then an untrained row of zeros, which classifier-free guidance cannot use.

    Returns:
        The model, in evaluation mode.

    Raises:
        BackboneError: Names that are unknown or missing, shapes or positions that do not fit.
    """
    is_state = isinstance(weights, Mapping)
    content = weights if isinstance(weights, Mapping) else _read(Path(weights))
    state = _state_dict(content, "the state dict" if is_state else str(weights))
    converted = convert(state, source)
    saved = getattr(content.get("args"), "num_classes", None)
    rows = converted["labels.table.weight"].shape[0] if "labels.table.weight" in converted else 0
    if num_classes is None and rows and saved in (rows, rows - 1):
        num_classes = saved
    arguments = describe(state, source, heads, num_classes)
    if rows and arguments["num_classes"] == rows:
        table = converted["labels.table.weight"]
        converted["labels.table.weight"] = torch.cat([table, torch.zeros_like(table[:1])])
        warnings.warn(
            f"these {source} weights have no null class (class_dropout_prob=0): its embedding is "
            "zero and untrained, so do not sample with classifier-free guidance",
            stacklevel=2,
        )
    model = create(**arguments)
    expected = {key: tensor.shape for key, tensor in model.state_dict().items()}
    available = {key: tensor.shape for key, tensor in converted.items()}
    misfits = []
    for key in sorted(expected.keys() | available.keys()):
        if expected.get(key) != available.get(key):
            misfits.append(key)
    require(not misfits, f"{source} weights lack, or do not fit, {_listed(misfits)}", BackboneError)
    _check_positions(_plain(state), model, source)
    model.load_state_dict(converted)
    return model.eval()


def _check_positions(published: Mapping[str, Tensor], model: Backbone, source: str) -> None:
    """Raise `BackboneError` unless the position tables equal those that the model computes."""
    require(
        _equal(published["pos_embed"][0], model.positions),
        f"{source} weights have learned positions, or none of a square grid; ours are the "
        "fixed sin-cos of one",
        BackboneError,
    )
    for key, wave in _ROPE.items():
        angles = rope_2d(model.size.width // model.size.heads, model.grid)
        require(
            key not in published or _equal(published[key], wave(angles).repeat_interleave(2, 1)),
            f"{source} weights were trained with other rotary positions than ours at {key}; "
            "ours count patches from 0 with base 10000",
            BackboneError,
        )


def _plain(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # torch's AveragedModel counts its updates beside the weights.
    weights = {key: value for key, value in state.items() if key != "n_averaged"}
    weights_by_name = {_PREFIX.sub("", key): value for key, value in weights.items()}
    for key, value in weights_by_name.items():
        require(
            value.numel() and value.dim() == _AXES.get(key, max(1, value.dim())),
            f"no weights have the shape {tuple(value.shape)} at {key}",
            BackboneError,
        )
    return weights_by_name


def _equal(table: Tensor, ours: Tensor) -> bool:
    # Weights in half precision come with rounded tables.
    rounding = {torch.float16: 1e-3, torch.bfloat16: 8e-3}.get(table.dtype, 1e-4)
    return table.shape == ours.shape and bool((table.float() - ours).abs().max() <= rounding)


def _read(path: Path) -> Mapping[str, Any]:
    """Return what a file of weights holds: a state dict, or a checkpoint around several."""
    if path.suffix == ".safetensors":
        return read_safetensors(path)[0]
    return read_torch(path)


def _is_average(key: object, value: object) -> bool:
    """Return whether an entry of a checkpoint is an average of the weights."""
    if not isinstance(value, Mapping) or not value:
        return False
    parts = re.split("[^a-z]+", str(key).lower())
    return "n_averaged" in value or bool(_AVERAGES & set(parts))


def _state_dict(content: Mapping[Any, Any], source: str) -> dict[str, Tensor]:
    """Return the state dict in a checkpoint (the moving average if any), or one passed as such."""
    averages = [key for key, value in content.items() if _is_average(key, value)]
    require(
        len(averages) <= 1 or "ema" in averages,
        f"{source} holds several averages of the weights, {', '.join(map(str, averages))}; pass "
        "the state dict of one",
        BackboneError,
    )
    raw = [key for key in _RAW if isinstance(content.get(key), Mapping)]
    state: Mapping[Any, Any] = content
    if averages:
        state = content["ema" if "ema" in averages else averages[0]]
    elif raw:
        state = content[raw[0]]
    require(
        all(isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items()),
        f"{source} holds no state dict: expected names with a tensor each",
        BackboneError,
    )
    return dict(state)

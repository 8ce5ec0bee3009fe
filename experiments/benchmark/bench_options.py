"""Options of `python experiments/bench.py`, and its command line of `key=value` (no torch here)."""

from __future__ import annotations

import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill, indent
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, Lt

from backbones.parsing import whole
from backbones.registry import find
from backbones.sizes import parse_size
from backbones.validation import fields_of, show, validate
from experiments.options.training import MOST_THREADS
from routing.errors import UserError, suggest
from routing.route import Route, SelectionMode

Variant = Literal["torch", "bf16", "compiled", "bf16+compiled", "plain", "plain+compiled"]
VARIANTS: tuple[Variant, ...] = typing.get_args(Variant)
Tokens = Annotated[int, Ge(1), Le(4096**2)]


class BenchError(UserError):
    """A key or value of the benchmark that does not exist or does not fit."""


@dataclass(frozen=True)
class BenchOptions:
    """Options of the benchmark; lists are separated by commas."""

    backbone: Annotated[tuple[str, ...], "Families."] = ("dit", "mamba", "rwkv")
    size: Annotated[tuple[str, ...], "Sizes, such as S/2."] = ("S/2",)
    tokens: Annotated[tuple[Tokens, ...], "Grid tokens; square numbers."] = (256,)
    rate: Annotated[
        tuple[Annotated[float, Ge(0), Lt(1)], ...], "Shares of tokens that skip inside the route."
    ] = (0.5,)
    route: Annotated[
        str, "Route without rates; auto is the paper's, from block 2 to the fourth last."
    ] = "auto"
    selection: Annotated[SelectionMode, "Which tokens stay (routing.selection)."] = "random"
    batch: Annotated[int, Ge(1), Le(10**6), "Samples in a step."] = 8
    depth: Annotated[
        Annotated[int, Ge(1), Le(1024)] | None,
        "Blocks, instead of the size's; fewer make it quicker and change little per block.",
    ] = None
    rounds: Annotated[
        int, Ge(1), Le(10**6), "How often all variants are run in turn; medians are reported."
    ] = 7
    parts: Annotated[
        tuple[Literal["steps", "variants"], ...],
        "What to measure: steps (the main table) and variants (the same steps run otherwise).",
    ] = ("steps",)
    variants: Annotated[
        tuple[Variant, ...],
        "Of the part variants: torch (without the native CPU operations), bf16, compiled, "
        "bf16+compiled, and for dit the plain reimplementation, plain and plain+compiled, each "
        "against the step as the other keys have it.",
    ] = VARIANTS
    plain: Annotated[
        bool,
        "Also time a plain reimplementation of the official structure of DiT with TREAD in steps.",
    ] = True
    device: Annotated[Literal["auto", "cpu", "cuda"], "Where to run."] = "auto"
    precision: Annotated[Literal["fp32", "bf16"], "fp32 or bf16 (autocast)."] = "fp32"
    tf32: Annotated[bool, "TF32 matmuls on CUDA."] = True
    fp32_after: Annotated[
        bool, "The block after the route in float32 under autocast, as in the released code."
    ] = False
    compile: Annotated[
        Literal["none", "blocks"],
        "none or blocks (torch.compile, block by block, of the plain DiT too).",
    ] = "none"
    graphs: Annotated[bool, "Replay a step as a CUDA graph."] = False
    threads: Annotated[
        Annotated[int, Ge(1), Le(MOST_THREADS)] | None, "CPU threads; null for torch's own choice."
    ] = None
    clock: Annotated[
        Literal["wall", "cpu"],
        "wall, or cpu for the process's own seconds: on a busy machine, with threads=1.",
    ] = "wall"
    out: Annotated[str, "File for the figures."] = "runs/bench.json"

    def check_consistency(self) -> None:
        """Refuse unknown families and sizes, invalid routes, and tokens that fill no square."""
        for name in self.backbone:
            find(name)
        for size in self.size:
            parse_size(size, self.depth)
        if "@" in self.route:
            route = re.sub(r"@[\d.]+", "", self.route)
            rates = ",".join(dict.fromkeys(re.findall(r"@([\d.]+)", self.route)))
            raise BenchError(
                f"route={self.route}: rates have a key; type route={route} rate={rates}"
            )
        Route.parse(self.route)
        for count in self.tokens:
            square = round(count**0.5) ** 2
            if square != count:
                raise BenchError(f"tokens={count} is no square number: try tokens={square}")


def parse(argv: Sequence[str], options: type) -> Any:
    """Read `key=value` arguments as the options of a dataclass, such as `BenchOptions`.

    Raises:
        UserError: An unknown key, an argument without `=`, or an invalid value.
    """
    fields = fields_of(options)
    values: dict[str, Any] = {}
    for argument in argv:
        key, equals, text = argument.partition("=")
        if not equals or not text:
            raise BenchError(f"{argument!r}: expected key=value, such as backbone=mamba")
        if key not in fields:
            raise BenchError(f"unknown key {key}{suggest(key, fields)}")
        value_type = fields[key].type
        if typing.get_origin(value_type) is tuple:
            item_type = typing.get_args(value_type)[0]
            values[key] = [_parse_value(item, item_type) for item in text.split(",")]
        else:
            values[key] = _parse_value(text, value_type)
    return validate(options, values)


def _parse_value(text: str, value_type: Any) -> Any:
    """Parse a value, but not as YAML, in which 010 is eight and 1e-1 is text."""
    if value_type is str:
        return text
    constants = {"true": True, "false": False, "null": None}
    # `none` is a word of some options and means null for others.
    if text == "none" and typing.get_origin(value_type) is not Literal:
        return None
    if text in constants:
        return constants[text]
    for parse_number in (whole, float):
        try:
            return parse_number(text)
        except ValueError:
            continue
    return text


def help_text() -> str:
    """Return all keys with their defaults and comments."""
    lines = [
        "python experiments/bench.py [key=value ...]",
        "",
        "Times training steps dense and routed, side by side in one process, and prints",
        "measured times next to the MACs.",
        "",
        "  python experiments/bench.py backbone=dit depth=8 rounds=3",
        "  python experiments/bench.py tokens=64,256,1024 rate=0.5,0.75",
        "  python experiments/bench.py size=XL/2 batch=64 precision=bf16 graphs=true",
        "",
    ]
    for name, field in fields_of(BenchOptions).items():
        lines.append(f"  {name}={show(field.default).strip('[]')}")
        lines.append(indent(fill(field.comment, 74), 6 * " "))
    return "\n".join(lines)

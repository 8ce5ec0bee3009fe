"""What to measure: the keys of `python experiments/bench.py` (no torch here)."""

from __future__ import annotations

import contextlib
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill, indent
from typing import Annotated, Any

from backbones.registry import find
from backbones.sizes import parse_size
from experiments.config.schema import MOST_THREADS
from experiments.options.fields import Key, build, keys_of
from experiments.runtime.parsing import whole
from routing.errors import UserError
from routing.route import Route

PARTS = ("steps", "variants", "blocks", "loop")
VARIANTS = ("torch", "bf16", "compiled", "bf16+compiled")


class BenchError(UserError):
    """A key or value of the benchmark that does not exist or does not fit."""


@dataclass(frozen=True)
class BenchOptions:
    """Keys of the benchmark; lists are separated by commas.

    Attributes:
        backbone: Families.
        size: Sizes, such as S/2.
        tokens: Grid tokens; square numbers.
        rate: Shares of tokens that skip inside the route.
        route: Route without rates; `auto` is the paper's, from block 2 to the fourth last.
        selection: Which tokens stay (routing/selection.py).
        batch: Samples in a step.
        depth: Blocks, instead of the size's; fewer make it quicker and change little per block.
        rounds: How often all variants are run in turn; medians are reported.
        parts: What to measure: `steps` (the main table), `variants` (the same steps run otherwise),
            `blocks` (one block of each family by tokens: where they cross, what they keep) and
            `loop` (the training loop's own share at scale tiny, and the time to the first step).
        variants: Of the part `variants`: `torch` (without the native CPU operations), `bf16`,
            `compiled` and `bf16+compiled`, each against the step as the other keys have it.
        block_tokens: Tokens of the part `blocks`.
        plain: Also time a plain reimplementation of the official structure of DiT with TREAD.
        device: auto, cpu or cuda.
        precision: fp32 or bf16 (autocast).
        tf32: TF32 matmuls on CUDA.
        fp32_after: The block after the route in float32 under autocast, as in the released code.
        compile: none or blocks (torch.compile, block by block, of the plain DiT too).
        graphs: Replay a step as a CUDA graph.
        threads: CPU threads; null for torch's own choice.
        clock: `wall`, or `cpu` for the process's own seconds: on a busy machine, with threads=1.
        out: File for the figures.
    """

    backbone: tuple[str, ...] = ("dit", "mamba", "rwkv")
    size: tuple[str, ...] = ("S/2",)
    tokens: Annotated[tuple[int, ...], Key(least=1, most=4096**2)] = (256,)
    rate: Annotated[tuple[float, ...], Key(least=0, below=1)] = (0.5,)
    route: str = "auto"
    selection: str = "random"
    batch: Annotated[int, Key(least=1, most=10**6)] = 8
    depth: int | None = None
    rounds: Annotated[int, Key(least=1, most=10**6)] = 7
    parts: Annotated[tuple[str, ...], Key(among=PARTS)] = ("steps", "blocks", "loop")
    variants: Annotated[tuple[str, ...], Key(among=VARIANTS)] = VARIANTS
    block_tokens: Annotated[tuple[int, ...], Key(least=1, most=4096**2)] = (64, 256, 1024, 4096)
    plain: bool = True
    device: Annotated[str, Key(among=("auto", "cpu", "cuda"))] = "auto"
    precision: Annotated[str, Key(among=("fp32", "bf16"))] = "fp32"
    tf32: bool = True
    fp32_after: bool = False
    compile: Annotated[str, Key(among=("none", "blocks"))] = "none"
    graphs: bool = False
    threads: Annotated[int | None, Key(least=1, most=MOST_THREADS)] = None
    clock: Annotated[str, Key(among=("wall", "cpu"))] = "wall"
    out: str = "runs/bench.json"

    def __post_init__(self) -> None:
        for name in self.backbone:
            find(name)
        for size in self.size:
            parse_size(size, self.depth)
        if "@" in self.route:
            bare = re.sub(r"@[\d.]+", "", self.route)
            rate = ",".join(dict.fromkeys(re.findall(r"@([\d.]+)", self.route)))
            raise BenchError(f"route={self.route}: rates have a key; type route={bare} rate={rate}")
        Route.parse(self.route)
        for count in (*self.tokens, *self.block_tokens):
            if (near := round(count**0.5) ** 2) != count:
                raise BenchError(f"tokens={count} is no square number: try tokens={near}")


def parse(argv: Sequence[str], kind: Any) -> Any:
    """Read `key=value` words as the options of a dataclass, such as `BenchOptions`.

    Raises:
        UserError: An unknown key, a word without `=`, or a value of the wrong kind.
    """
    fields, values = keys_of(kind), dict[str, Any]()
    for word in argv:
        key, equals, text = word.partition("=")
        if not equals or not text:
            raise BenchError(f"{word!r}: expected key=value, such as backbone=mamba")
        wanted = fields[key][0] if key in fields else str
        if typing.get_origin(wanted) is tuple:
            each = typing.get_args(wanted)[0]
            values[key] = [_value(item, each) for item in text.split(",")]
        else:
            values[key] = _value(text, wanted)
    return build(kind, values)


def _value(text: str, wanted: Any) -> Any:
    """Return the value of a word: not YAML's, where 010 is eight and 1e-1 a word."""
    if wanted is not str:
        with contextlib.suppress(KeyError):
            return {"true": True, "false": False, "null": None, "none": None}[text]
        for number in (whole, float):
            with contextlib.suppress(ValueError):
                return number(text)
    return text


def help_text() -> str:
    """Return every key with its default and meaning, from the class above."""
    lines = [
        "python experiments/bench.py [key=value ...]",
        "",
        "Times training steps dense and routed, and single blocks, side by side in one",
        "process, and prints what the clock shows beside the MACs.",
        "",
        "  python experiments/bench.py backbone=dit depth=8 rounds=3",
        "  python experiments/bench.py tokens=64,256,1024 rate=0.5,0.75 parts=steps",
        "  python experiments/bench.py size=XL/2 batch=64 precision=bf16 graphs=true",
        "",
    ]
    doc = (BenchOptions.__doc__ or "").split("Attributes:")[1]
    for name, meaning in re.findall(r"^ +(\w+): (.+(?:\n {12}.+)*)", doc, re.MULTILINE):
        value = getattr(BenchOptions, name)
        shown = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        shown = {"True": "true", "False": "false", "None": "null"}.get(shown, shown)
        lines += [f"  {name}={shown}", indent(fill(" ".join(meaning.split()), 74), 6 * " ")]
    return "\n".join(lines)

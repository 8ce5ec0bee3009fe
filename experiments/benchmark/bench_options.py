"""What to measure: the keys of `python experiments/bench.py` (no torch here)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from backbones.registry import names
from backbones.sizes import parse_size
from experiments.config.schema import MOST_THREADS
from routing.errors import UserError, suggest
from routing.parsing import whole
from routing.route import Route

PARTS = ("steps", "variants", "profile", "blocks", "loop")
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
            `profile` (where a step's time goes), `blocks` (one block of each family by tokens:
            where they cross, what they keep) and `loop` (the training loop's own share at scale
            tiny, and the time to the first step).
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
    tokens: tuple[int, ...] = (256,)
    rate: tuple[float, ...] = (0.5,)
    route: str = "auto"
    selection: str = "random"
    batch: int = 8
    depth: int | None = None
    rounds: int = 7
    parts: tuple[str, ...] = ("steps", "profile", "blocks", "loop")
    variants: tuple[str, ...] = VARIANTS
    block_tokens: tuple[int, ...] = (64, 256, 1024, 4096)
    plain: bool = True
    device: str = "auto"
    precision: str = "fp32"
    tf32: bool = True
    fp32_after: bool = False
    compile: str = "none"
    graphs: bool = False
    threads: int | None = None
    clock: str = "wall"
    out: str = "runs/bench.json"

    def __post_init__(self) -> None:
        for key, words in (
            ("device", ("auto", "cpu", "cuda")),
            ("precision", ("fp32", "bf16")),
            ("compile", ("none", "blocks")),
            ("clock", ("wall", "cpu")),
        ):
            _among(key, getattr(self, key), words)
        for part in self.parts:
            _among("parts", part, PARTS)
        for variant in self.variants:
            _among("variants", variant, VARIANTS)
        for name in self.backbone:
            _among("backbone", name, names())
        for size in self.size:
            parse_size(size, self.depth)
        Route.parse(self.route)
        if "@" in self.route:
            bare = re.sub(r"@[\d.]+", "", self.route)
            rate = ",".join(dict.fromkeys(re.findall(r"@([\d.]+)", self.route)))
            raise BenchError(f"route={self.route}: rates have a key; type route={bare} rate={rate}")
        for key, most in (("batch", 10**6), ("rounds", 10**6), ("threads", MOST_THREADS)):
            value = getattr(self, key)
            if value is not None and not 1 <= value <= most:
                raise BenchError(f"{key}={value}: expected 1 or more, at most {most}")
        for count in (*self.tokens, *self.block_tokens):
            if count > 4096**2:
                raise BenchError(f"tokens={count}: expected at most {4096**2}")
            if count < 1 or round(count**0.5) ** 2 != count:
                near = max(1, round(count**0.5)) ** 2 if count > 0 else 64
                raise BenchError(f"tokens={count} is no square number: try tokens={near}")


def _among(key: str, value: str, words: Sequence[str]) -> None:
    if value not in words:
        raise BenchError(f"{key}={value}: expected {' | '.join(words)}{suggest(value, words)}")


def parse(argv: Sequence[str]) -> BenchOptions:
    """Read `key=value` words.

    Raises:
        BenchError: An unknown key, a word without `=`, or a value of the wrong kind.
    """
    fields = {f.name: str(f.type) for f in dataclasses.fields(BenchOptions)}
    values: dict[str, Any] = {}
    for word in argv:
        key, equals, text = word.partition("=")
        if not equals:
            raise BenchError(f"{word!r}: expected key=value, such as backbone=mamba")
        if key not in fields:
            raise BenchError(f"unknown key {key}{suggest(key, fields)}")
        values[key] = _value(key, text, fields[key])
    return BenchOptions(**values)


def _value(key: str, text: str, kind: str) -> Any:
    if kind.startswith("tuple"):
        inner = kind.removeprefix("tuple[").split(",")[0]
        found = tuple(_value(key, item, inner) for item in text.split(",") if item)
        if not found:
            raise BenchError(f"{key}={text}: expected one or more, such as {key}={_first(key)}")
        return found
    if "None" in kind and text in ("null", "none", ""):
        return None
    if kind == "bool":
        if text not in ("true", "false"):
            raise BenchError(f"{key}={text}: expected true or false")
        return text == "true"
    if kind == "str":
        if not text:
            raise BenchError(f"{key}=: expected a value, such as {key}={_first(key)}")
        return text
    try:
        return whole(text) if kind.startswith("int") else float(text)
    except ValueError:
        raise BenchError(f"{key}={text}: expected a number") from None


def _first(key: str) -> Any:
    default = BenchOptions.__dataclass_fields__[key].default
    return default[0] if isinstance(default, tuple) else default


def help_text() -> str:
    """Return every key with its default and meaning, from the class above."""
    lines = [
        "python experiments/bench.py [key=value ...]",
        "",
        "Times training steps dense and routed, a step's parts and single blocks, side by side in",
        "one process, and prints what the clock shows beside what multiply-accumulates allow.",
        "",
        "  python experiments/bench.py backbone=dit depth=8 rounds=3",
        "  python experiments/bench.py tokens=64,256,1024 rate=0.5,0.75 parts=steps",
        "  python experiments/bench.py size=XL/2 batch=64 precision=bf16 device=cuda graphs=true",
        "",
    ]
    doc = (BenchOptions.__doc__ or "").split("Attributes:")[1]
    meaning: dict[str, str] = {}
    for line in doc.splitlines():
        name, colon, rest = line.strip().partition(": ")
        if colon and name.isidentifier():
            meaning[name] = rest
        elif meaning and line.strip():
            meaning[list(meaning)[-1]] += " " + line.strip()
    for field in dataclasses.fields(BenchOptions):
        value = field.default
        shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
        shown = str(shown).lower() if isinstance(shown, bool) or shown is None else shown
        lines += [f"  {field.name}={shown}", f"      {meaning[field.name]}"]
    return "\n".join(lines).replace("=none\n", "=null\n")

"""What the guidance of a score means: its kind, its options, its place among other settings."""

import re

# Default rates of `routed`, which a score leaves out (experiments/options/guidance.py).
_ROUTED_DEFAULTS = {"strong": "0.5", "weak": "0.9"}
_KINDS = ("CFG", "SG", "routed")
UNGUIDED, ROUTED_PASS = "CFG 1", "routed"


def parse(text: str) -> tuple[str, dict[str, str]]:
    """Read a score's guidance, such as `cfg scale=1.5`, into its kind and its options.

    A score leaves out options that have their default; the two rates of `routed` are filled in.
    """
    kind, _, option_text = str(text).partition(" ")
    options = dict(re.findall(r"([A-Za-z_]+)=(\S+)", option_text))
    return kind, {**_ROUTED_DEFAULTS, **options} if kind == "routed" else options


def number(text: str | None) -> float | None:
    """Return a rate or scale as a number; None for a schedule such as `cosine:0.6:0`."""
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None


def setting(text: str) -> str | None:
    """Return a guidance's place on the response curve: `CFG 1.5`, `SG 1.5`, `routed`; else None.

    SG guides away from a pass at the rate of training, 0.5, towards a dense one.
    """
    kind, options = parse(text)
    scale = number(options.pop("scale", "1"))
    options.pop("route", None)
    if kind in ("none", "cfg") and scale is not None and not options:
        return f"CFG {scale:g}"
    strong, weak = number(options.pop("strong", None)), number(options.pop("weak", None))
    if kind != "routed" or scale is None or options:
        return None
    if scale == 1:
        return ROUTED_PASS if strong == 0.5 else None
    return f"SG {scale:g}" if (strong, weak) == (0, 0.5) else None


def setting_order(name: str) -> tuple[int, float]:
    """Return the sort key of a setting: CFG by scale, then SG, then routed."""
    kind, _, scale = name.partition(" ")
    return _KINDS.index(kind), float(scale or 0)

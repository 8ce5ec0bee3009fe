"""Words of a command line in Hydra's grammar: checked, quoted where it needs that, and read."""

from __future__ import annotations

import functools
import re
from typing import Any

from backbones.parsing import check_word
from experiments.config.groups import choosing_key
from experiments.options.roles import ConfigError
from routing.errors import suggest


def normalize(text: str) -> str:
    """Return one override in the form that Hydra takes.

    Raises:
        ConfigError: It is not `key=value`.
    """
    text = text.strip()
    check_word(text)
    if "=" not in text or text.startswith("="):
        hint = suggest(text, ["--dry-run", "--help"]) if text.startswith("-") else ""
        raise ConfigError(
            f"expected key=value, got {text!r}: for example backbone=mamba route=2-8{hint}"
        )
    key, value = text.split("=", 1)
    plain = key.lstrip("-+~")
    if plain != key:
        raise ConfigError(f"{key}={value}: expected {choosing_key(plain)}={value}")
    if key == "route":
        value = _normalize_route(value.strip("'\""))
    return quote(f"{key}={value}")


def _normalize_route(value: str) -> str:
    if value.startswith("["):
        return value
    with_point = re.sub(r"@(\d*),(?=\d)", r"@\1.", value)
    if with_point != value:
        raise ConfigError(f"route={value}: expected a decimal point, as in route={with_point}")
    if "," in value:
        joined = "+".join(part.strip() for part in value.split(","))
        raise ConfigError(f"route={value}: expected one route; two are joined as route='{joined}'")
    # Quoted, because characters of a route have a meaning in Hydra's grammar.
    return "'" + value.replace("'", "") + "'"


def quote(override: str) -> str:
    """Return an override whose value is quoted where Hydra's grammar could not read it.

    A path may hold letters beyond ASCII, quotes, `#`, `~` or `(`, which mean something else there.
    """
    key, value = override.split("=", 1)
    if re.fullmatch(r"[\w./:@%+*?,-]*", value, re.ASCII):
        return override
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Quote, QuotedString
    from hydra.errors import HydraException

    try:
        OverridesParser.create().parse_override(override)
    except HydraException:
        return f"{key}={QuotedString(value, Quote.single).with_quotes()}"
    return override


class SeveralValues(ConfigError):
    """An override has several values, or a comma at an end, where one is expected."""

    def __init__(self, override: str) -> None:
        super().__init__(f"{override}: expected one value")
        self.override = override


@functools.lru_cache(maxsize=4096)
def value_of(override: str) -> Any:
    """Return the value of a normalized override, as Hydra reads it.

    Raises:
        SeveralValues: It has several values, or a comma at an end.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:  # a stray comma, as in `seed=1,`: `quote` makes all else readable
        raise SeveralValues(override) from None
    if parsed.is_sweep_override():
        raise SeveralValues(override)
    return parsed.value()

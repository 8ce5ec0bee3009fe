"""Public names of a package, each imported when it is first asked for (PEP 562).

So a typo in a route, a size or a key is reported before torch is imported.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazily(
    package: str, home: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package.

    Args:
        package: Its name.
        home: Module of the package -> the names it has; one called like the module is the module.
    """
    where = {name: f"{package}.{module}" for module, names in home.items() for name in names}

    def get(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(where[name])
        return module if where[name].endswith(f".{name}") else getattr(module, name)

    return get, lambda: sorted(where), sorted(where)

"""What a run does with its tokens, from its config: route, rate and the name of the method."""

from __future__ import annotations

from typing import Any

from routing.route import Route


def derive(row: dict[str, Any]) -> None:
    """Add span, rate, selection, objective and variant to a run's flat row.

    Args:
        row: Columns as `analysis.load` names them.

    Raises:
        RouteError: if the route cannot be read.
    """
    route = Route.parse(str(row.get("route") or row.get("config.route") or "none"))
    rates = sorted({segment.rate for segment in route.segments})
    row["route"] = str(route)
    row["span"] = "+".join(f"{segment.start}-{segment.end}" for segment in route.segments) or "none"
    row["rate"] = rates[0] if len(rates) == 1 else (0.0 if not rates else float("nan"))
    row["selection"] = None if route.is_none else row.get("config.routing.selection", "random")
    row["objective"] = row.get("config.objective.name")
    row["variant"] = variant(row)
    row["throughput"] = _throughput(row)


def _throughput(row: dict[str, Any]) -> float | None:
    """Images per second over the whole run: what a log line says is one moment's."""
    steps, batch, seconds = (row.get(key) for key in ("step", "config.train.batch", "wall_s"))
    for part in (steps, batch, seconds):
        if not isinstance(part, int | float) or part <= 0:
            return None
    return float(steps) * float(batch) / float(seconds)  # type: ignore[arg-type]


def variant(row: dict[str, Any]) -> str:
    """Return the name of the method: dense, TREAD, dropping, MaskDiT, SPRINT, a control."""
    name = _tokens(row)
    first = (
        row.get("config.routing.reinsert") == "sum_input"
        or row.get("config.train.loss") == "ensemble"
    )
    if name == "TREAD" and first:
        name = "TREAD v1"
    aligned = row.get("config.train.encoder") not in (None, "none")
    return f"{name} + REPA" if aligned else name


def _tokens(row: dict[str, Any]) -> str:
    if row["span"] == "none":
        return "dense"
    learned = {"fuse": "SPRINT", "router": "learned router (control)"}
    if row.get("config.routing.learned") in learned:
        return learned[row["config.routing.learned"]]
    if row.get("config.routing.reinsert") == "none":
        keys = [key for key, value in row.items() if value is not None]
        return (
            "MaskDiT" if any(k.startswith("config.backbone.decoder") for k in keys) else "dropping"
        )
    remove = str(row.get("config.routing.remove", "start"))
    if remove.startswith("after"):
        return "delayed removal"
    return {"start": "TREAD", "never": "no removal (control)"}.get(remove, remove)

"""Loss curves of another trainer, from a CSV file."""

from pathlib import Path

import pandas as pd

from analysis.errors import AnalysisError

CSV_COLUMNS = ("run", "seed", "variant", "dense", "step", "loss", "macs_per_step")


def curves_of_csv(path: Path) -> pd.DataFrame:
    """Return the loss curves in a CSV file of any trainer.

    Columns: `run`, `seed`, `variant`, `dense` (0 or 1), `step`, `loss` (held out, of the pass over
    all tokens) and `macs_per_step`. All runs are one setting; the dense variant with the most MACs
    per step is the routed variants' own network.

    Raises:
        AnalysisError: The file is no such table; names the column.
    """
    try:
        frame = pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise AnalysisError(f"{path}: expected a CSV file ({error})") from None
    for column in CSV_COLUMNS:
        if column not in frame:
            raise AnalysisError(f"{path}: expected a column {column} (of {', '.join(CSV_COLUMNS)})")
    for column in ("seed", "dense", "step", "loss", "macs_per_step"):
        values = pd.to_numeric(frame[column], errors="coerce")
        if values.isna().any():
            row = int(values.isna().to_numpy().argmax()) + 2
            raise AnalysisError(f"{path}: line {row}: {column}={frame[column][row - 2]}: no number")
        frame[column] = values
    smallest = frame[["step", "loss", "macs_per_step"]].min().min()
    if not frame["dense"].isin([0, 1]).all() or smallest <= 0:
        raise AnalysisError(f"{path}: expected dense 0 or 1, and step, loss, macs_per_step above 0")
    for (name, seed), part in frame.groupby(["variant", "seed"]):
        if part["run"].nunique() > 1:
            raise AnalysisError(f"{path}: variant={name} seed={seed}: expected one run of them")
    frame = frame.drop_duplicates(["variant", "seed", "step"], keep="last")
    dense, variant = frame["dense"] == 1, frame["variant"].astype(str)
    full = variant[dense].loc[frame["macs_per_step"][dense].sort_values().index[-1:]]
    network = variant.where(dense & ~variant.isin(full), "")
    return pd.DataFrame({
        "setting": path.stem, "network": network, "variant": variant, "model": variant,
        "dense": dense, "seed": frame["seed"].astype(int), "step": frame["step"].astype(float),
        "loss": frame["loss"].astype(float), "macs": frame["step"] * frame["macs_per_step"],
    }).sort_values(["variant", "seed", "step"])  # fmt: skip

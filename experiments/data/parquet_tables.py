"""Pictures in parquet and arrow tables, as the Hugging Face hub holds data sets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.data.data_options import DataError
from experiments.data.picture_sources import Raw, Source, digest
from routing.plain import json_of

_GUESSES = {
    "image": ("image", "img", "jpg", "png", "webp"),
    "label": ("label", "labels", "cls", "fine_label", "class"),
    "caption": ("caption", "captions", "text", "txt", "sentences", "sentences_raw"),
}


class TableSource(Source):
    """Tables of parquet or arrow, as the Hugging Face hub holds data sets.

    Args:
        files: The tables, sorted.
        columns: Names of the `image`, `label` and `caption` columns where they cannot be guessed.

    Raises:
        DataError: pyarrow is missing, a damaged table, or no column of pictures.
    """

    def __init__(self, files: list[Path], columns: dict[str, str]) -> None:
        try:
            import pyarrow  # noqa: F401
        except ImportError:
            raise DataError('tables need pyarrow; pip install -e ".[data]"') from None
        self._blocks: list[tuple[Path, int, int]] = []
        schema = None
        for path in files:
            found, counts = _open_table(path)
            schema = schema or found
            self._blocks += [(path, block, rows) for block, rows in enumerate(counts)]
        assert schema is not None
        self.count = sum(rows for *_, rows in self._blocks)
        self._columns = {
            role: _column(schema, role, columns.get(role), str(files[0])) for role in _GUESSES
        }
        if self._columns["image"] is None or not self.count:
            raise DataError(
                f"{files[0]} has no pictures in columns {', '.join(schema.names) or 'none'}; "
                "name the column with --image-column"
            )
        self.labelled = self._columns["label"] is not None
        self.captioned = self._columns["caption"] is not None
        self.classes = _class_names(schema, self._columns["label"])
        self.fingerprint = digest([[p.name, p.stat().st_size] for p in files])

    def read(self, start: int, stop: int) -> Iterator[Raw]:
        """Give pictures `start..stop-1`."""
        at = 0
        wanted = [name for name in self._columns.values() if name is not None]
        for path, block, rows in self._blocks:
            low, high = max(start - at, 0), min(stop - at, rows)
            if low < high:
                table = _read_block(path, block, wanted).slice(low, high - low)
                for i, row in enumerate(table.to_pylist(), low):
                    yield self._raw(row, f"{path.name}: row {at + i}")
            at += rows

    def _raw(self, row: dict[str, Any], where: str) -> Raw:
        image = row[str(self._columns["image"])]
        content = image.get("bytes") if isinstance(image, dict) else image
        label = row[str(self._columns["label"])] if self.labelled else None
        if self.labelled and not isinstance(label, int):
            raise DataError(f"{where} has label {label!r}; expected a whole number")
        said = row[str(self._columns["caption"])] if self.captioned else ()
        captions = (said,) if isinstance(said, str) else tuple(map(str, said or ()))
        return Raw(where, content if isinstance(content, bytes) else None, label, captions)


def _column(schema: Any, role: str, given: str | None, where: str) -> str | None:
    if given is not None and given not in schema.names:
        raise DataError(f"{where} has no column {given!r}; it has {', '.join(schema.names)}")
    return given or next((name for name in _GUESSES[role] if name in schema.names), None)


def _class_names(schema: Any, column: str | None) -> tuple[str, ...]:
    try:
        features = json_of(schema.metadata[b"huggingface"])["info"]["features"]
        return tuple(map(str, features[str(column)]["names"]))
    except (KeyError, TypeError, ValueError):
        return ()


def _open_table(path: Path) -> tuple[Any, list[int]]:
    """Return a table's schema and the rows of each block that is read at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if path.suffix == ".parquet":
            with pq.ParquetFile(path) as file:
                groups = range(file.num_row_groups)
                return file.schema_arrow, [file.metadata.row_group(k).num_rows for k in groups]
        table = _map_arrow(path)
        return table.schema, [table.num_rows]
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is damaged or no table: {str(error).splitlines()[0]}") from None


def _read_block(path: Path, block: int, columns: list[str]) -> Any:
    import pyarrow.parquet as pq

    if path.suffix == ".parquet":
        with pq.ParquetFile(path) as file:
            return file.read_row_group(block, columns=columns)
    return _map_arrow(path).select(columns)


def _map_arrow(path: Path) -> Any:
    import pyarrow as pa

    # The hub's cache holds streams; other writers leave files with a footer.
    try:
        return pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
    except pa.ArrowInvalid:
        return pa.ipc.open_file(pa.memory_map(str(path))).read_all()

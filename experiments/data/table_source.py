"""Images in parquet tables, the format of data sets on the Hugging Face hub."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from backbones.parsing import check_file, json_of
from experiments.data.data_options import DataError, first_line, require
from experiments.data.image_sources import ImageSource, LeftOut, digest_of
from experiments.data.raw_images import RawImage
from experiments.runtime.digest import hash_of, sampled

# Common names of columns, the most frequent first.
_COMMON_NAMES = {
    "image": ("image", "img", "jpg", "png", "webp"),
    "label": ("label", "labels", "cls", "fine_label", "class"),
    "caption": ("caption", "text", "txt"),
}


class TableSource(ImageSource):
    """Parquet tables with a column of images, and columns of labels and captions if there are any.

    Args:
        files: The tables, all with the same columns.
        columns: Names of the columns by role (`image`, `label`, `caption`); None to guess.
    """

    def __init__(self, files: list[Path], columns: Mapping[str, str | None]) -> None:
        self._sampled = functools.cache(sampled)  # shards share tables
        self._groups: list[tuple[Path, int, int]] = []  # file, row group, number of rows
        self.count = 0
        for path in files:
            with _parquet_file(path) as file:
                for group in range(file.num_row_groups):
                    rows = file.metadata.row_group(group).num_rows
                    self._groups.append((path, group, rows))
                    self.count += rows
        with _parquet_file(files[0]) as file:
            schema = file.schema_arrow
        listed = ", ".join(schema.names) or "none"
        self._columns: dict[str, str] = {}  # name by role, of the roles that the tables have
        overrides = []
        for role, common_names in _COMMON_NAMES.items():
            guess = next((name for name in common_names if name in schema.names), None)
            name = columns.get(role) or guess
            require(
                name is None or name in schema.names,
                f"{files[0]} has no column {name!r}; it has {listed}",
            )
            if name is not None:
                self._columns[role] = name
            if name != guess:
                overrides.append([role, name])
        require(
            "image" in self._columns and self.count > 0,
            f"{files[0]} has no images in columns {listed}; name the column with --image-column",
        )
        self.left_out = LeftOut()
        for name in schema.names:
            if name not in self._columns.values():
                self.left_out.add("columns", name)
        self.labelled, self.captioned = "label" in self._columns, "caption" in self._columns
        self.classes = _class_names(schema, self._columns.get("label"))
        # With columns that differ from the guess, the same files are other data.
        sizes = [[path.name, path.stat().st_size] for path in files]
        self.fingerprint = digest_of([*sizes, *overrides])

    def digest(self, start: int, stop: int) -> str:
        """Return a digest of blocks of the tables that hold rows `start..stop-1`."""
        first_row, files = 0, []
        for path, _, count in self._groups:
            if first_row < stop and start < first_row + count and path not in files:
                files.append(path)
            first_row += count
        return hash_of(map(self._sampled, files))

    def read(self, start: int, stop: int) -> Iterator[RawImage]:
        """Yield images `start..stop-1`."""
        first_row = 0
        names = list(self._columns.values())
        for path, group, count in self._groups:
            low, high = max(start - first_row, 0), min(stop - first_row, count)
            if low < high:
                with _parquet_file(path) as file:
                    table = file.read_row_group(group, names)
                rows = table.slice(low, high - low).to_pylist()
                for number, row in enumerate(rows, first_row + low):
                    # A later table may lack a column that the first one has.
                    by_role = {role: row.get(name) for role, name in self._columns.items()}
                    yield self._raw(by_role, f"{path.name}: row {number}")
            first_row += count

    def _raw(self, row: dict[str, Any], name: str) -> RawImage:
        image, label, caption = row["image"], row.get("label"), row.get("caption")
        content = image.get("bytes") if isinstance(image, dict) else image
        require(
            not self.labelled or isinstance(label, int),
            f"{name} has label {label!r}; expected a whole number",
        )
        require(
            not self.captioned or isinstance(caption, str),
            f"{name} has caption {caption!r}; expected text",
        )
        captions = (caption,) if self.captioned and caption else ()
        return RawImage(name, content if isinstance(content, bytes) else None, label, captions)


def _class_names(schema: Any, column: str | None) -> tuple[str, ...]:
    """Return the class names in the metadata of the `datasets` library, () without any."""
    try:
        features = json_of(schema.metadata[b"huggingface"])["info"]["features"]
        return tuple(map(str, features[str(column)]["names"]))
    except (KeyError, TypeError, ValueError):
        return ()


@contextlib.contextmanager
def _parquet_file(path: Path) -> Iterator[Any]:
    """Open a parquet file."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise DataError('tables need pyarrow; pip install -e ".[data]"') from None
    try:
        check_file(path)
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is damaged or no table: {first_line(error)}") from None

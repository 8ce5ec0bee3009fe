"""Options of data=folder: a user's own pictures, in class folders or in one folder (no torch)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from experiments.data.data_options import import_name, require
from experiments.data.image_options import SplitOptions

_MODULE = "experiments.data.picture_folder"


@dataclass(frozen=True)
class FolderOptions(SplitOptions):
    """Your own pictures as pixels in memory: one subfolder for each class, or one folder.

    Subfolders train/ and test/ (or val/) are the published split; otherwise a share of every class
    is held out.
    """

    name: str = "folder"
    path: Annotated[
        str | None,
        "Folder with one subfolder of pictures for each class, with such folders in train/ and "
        "test/ (or val/), or with unlabelled pictures (task=none guidance=none). Required: "
        "data.path=DIR.",
    ] = None
    size: Annotated[
        int,
        Ge(4),
        Le(512),
        "Side of the images in pixels: the shorter side is resized to it, the centre cropped.",
    ] = 32
    channels: Annotated[Literal[3, 1], "3: RGB; 1: grey."] = 3
    flip: Annotated[Literal["none", "mirror"], "mirror: mirror half of the training images."] = (
        "none"
    )

    # Assumed while there is no folder.
    class_count = 1
    patch = 4

    def __post_init__(self) -> None:
        object.__setattr__(self, "sample_shape", (self.channels, self.size, self.size))
        object.__setattr__(self, "mirrored", self.flip == "mirror")

    def open_splits(self) -> Any:
        """Return `picture_folder.FolderSplits`: the pictures and their classes.

        Raises:
            DataError: The folder is missing, or its layout is not supported.
        """
        require(
            bool(self.path and self.path.strip()),
            "data=folder needs your pictures: data.path=DIR with one subfolder for each class",
        )
        return import_name(f"{_MODULE}.open_splits")(self.path)

    def read(self) -> Any:
        """Return `image_sets.LabelledImages`: all pictures, cropped and resized."""
        return import_name(f"{_MODULE}.read_splits")(self, self.open_splits())

    def describe(self) -> dict[str, Any]:
        """Return the description, with the number of class folders where the folder exists.

        Raises:
            DataError: The folder exists, and its layout is not supported.
        """
        description = super().describe()
        if self.fingerprint() != "absent":
            description["num_classes"] = len(self.open_splits().class_names)
        return description

    def check_files(self) -> None:
        """Raise `DataError` for a missing folder, or for more pictures than memory should hold."""
        import_name(f"{_MODULE}.check_memory")(self, self.open_splits())

    def fingerprint(self) -> str:
        """Return a checksum of the names and sizes of the files."""
        if not self.path:
            return "absent"
        return str(import_name(f"{_MODULE}.listing_fingerprint")(self.path))

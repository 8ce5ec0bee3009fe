"""Latents on disk as a data set.

A stored row is a sample z of the autoencoder's posterior, or its moments (m, log s^2), from which
every step draws a new sample z = m + s n. The model sees x = (z - a) / b with two numbers per
channel: the VAE's shift and scale factor, or the data's mean and standard deviation.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from experiments.data.data_options import DataError, require, warn_of_empty_classes
from experiments.data.dataset import Batch, Condition, Rows, SampleOrder
from experiments.data.encoders import sample_moments
from experiments.data.latent_manifest import low_label_warning
from experiments.data.latent_space import Decoding, LatentSpace
from experiments.data.latent_store import Store, open_store
from routing.rng import Draws

# diffusers' `scaling_factor` of Stable Diffusion's first VAE, assumed for third-party 4-channel
# latents.
SD_SCALE = 0.18215
_HELD_OUT_SEED = 0x7EAD
_STATISTICS_SAMPLES = 2048
# Labels of a part of ImageNet are in range, though it has fewer samples than classes.
_USUAL_CLASSES = 1000


class Latents(LatentSpace):
    """A latent store, with a second store or a part of the first one as held-out split."""

    reads_disk = True
    _warned = False  # of latents that are not finite

    def _open(self) -> None:
        super()._open()
        options = self.options
        options.check_files()
        assert options.path
        store = open_store(options.path, kind=options.kind, verify=options.verify)
        self._stores = {"train": store}
        self._rows = {"train": torch.arange(store.count)}  # rows of its store in each split
        self.shape = store.shape
        self.fingerprint = store.fingerprint
        store.check_finite(options.path)
        self._read_conditions(store, options.path)
        if options.test:
            test_store = open_store(options.test, kind=options.kind, verify=options.verify)
            self._check_alike(store, test_store)
            test_store.check_finite(options.test)
            self._read_conditions(test_store, options.test)
            self._stores["test"] = test_store
            self._rows["test"] = torch.arange(test_store.count)
            self.fingerprint += f"-{test_store.fingerprint}"
        elif options.held_out:
            self._hold_out(store, options.held_out)
        self.sizes = {split: len(rows) for split, rows in self._rows.items()}
        # A lowest label above 0 has a warning of its own.
        if self.task == "class" and store.labels is not None and int(store.labels.min()) == 0:
            present = set(store.labels[self._rows["train"]].unique().tolist())
            warn_of_empty_classes("latents", present, self.class_names)
        self._set_decoding(store)

    def _hold_out(self, store: Store, held_out: int) -> None:
        """Split one store by a fixed permutation."""
        require(
            held_out < store.count,
            f"data.held_out={held_out} leaves nothing of {store.count} samples to train on",
        )
        order = SampleOrder(_HELD_OUT_SEED, store.count).lookup(self._rows["train"])
        self._stores["test"] = store
        self._rows = {"train": order[held_out:].sort()[0], "test": order[:held_out].sort()[0]}

    def _check_alike(self, store: Store, test_store: Store) -> None:
        """Refuse a held-out store with another shape or scale than the training store."""

        def compare(name: str, value: Any, test_value: Any) -> None:
            require(
                test_value == value,
                f"data.test={self.options.test} holds {test_value} and data.path {value}; both "
                f"must have one {name}",
            )

        compare("shape", store.shape, test_store.shape)
        if self.task == "text" and store.text and test_store.text:
            compare("shape of captions", store.text[1:], test_store.text[1:])
        if self.options.scaled == "auto":
            names = {False: "latents as its VAE makes them", True: "scaled latents"}
            compare("scale (data.scaled=yes|no)", names[store.scaled], names[test_store.scaled])
        if test_store.scale_factor and store.scale_factor:
            compare("scale factor of the VAE", store.scale_factor, test_store.scale_factor)

    def _read_conditions(self, store: Store, path: str) -> None:
        """Set classes or the shape of captions; refuse a store that lacks what the task needs."""
        lacks = f"{path} is {store.layout} without"
        if self.task == "text":
            advice = "use task=class, or prepare it with --captions and --text"
            require(store.text is not None, f"{lacks} captions; {advice}")
            self.text = store.text[1:] if store.text else None
        if self.task != "class":
            return
        if store.labels is None:
            advice = "use task=none, or store a label (cls) with every latent"
            raise DataError(f"{lacks} labels; {advice}")
        low, high = int(store.labels.min()), int(store.labels.max())
        # A held-out store's labels are compared with the classes of the training store.
        named = bool(store.classes or self.options.num_classes or self.num_classes)
        require(
            named or high < max(store.count, _USUAL_CLASSES),
            f"{path} has label {high} and {store.count} samples; set data.num_classes={high + 1} "
            "if there are so many classes, or repair the store",
        )
        class_names = self._stores["train"].classes
        # Without a name in common, labels keep their numbers.
        common_names = set(store.classes) & set(class_names)
        differ = store.classes != class_names and bool(common_names)
        if differ and 0 <= low <= high < len(store.classes):
            store.labels = self._map_labels(store.labels, store.classes, class_names, path)
            high = int(store.labels.max())
        self.num_classes = (
            self.options.num_classes or len(class_names) or self.num_classes or high + 1
        )
        invalid = low if low < 0 else high
        require(
            0 <= low <= high < self.num_classes,
            f"{path} has label {invalid}, outside 0..{self.num_classes - 1}; set "
            f"data.num_classes={high + 1}, or repair the store",
        )
        if low > 0 and store is self._stores["train"]:
            warnings.warn(low_label_warning(f"{path}: its", low), stacklevel=2)
        self.class_names = class_names or tuple(map(str, range(self.num_classes)))

    def _map_labels(
        self, labels: Tensor, names: Sequence[str], class_names: Sequence[str], path: str
    ) -> Tensor:
        """Renumber labels of a store with class `names` to those of the training store."""
        numbers = {name: number for number, name in enumerate(class_names)}
        mapping = torch.full((len(names),), -1)
        for label in labels.unique().tolist():
            require(
                names[label] in numbers,
                f"{path} has classes that {self.options.path} lacks, such as {[names[label]]}; "
                "prepare it without them",
            )
            mapping[label] = numbers[names[label]]
        return mapping[labels]

    def _set_decoding(self, store: Store) -> None:
        """Set shift and unit, by which latents are normalised and decoded."""
        options = self.options
        # `auto`: samples in third-party stores are scaled, as the TREAD release expects them.
        scaled = store.scaled if options.scaled == "auto" else options.scaled == "yes"
        factor = options.scale_factor or store.scale_factor
        if factor is None and self.shape[0] == 4:
            factor = SD_SCALE
        shape = (self.shape[0], 1, 1)
        shift, unit = torch.zeros(shape), torch.ones(shape)
        if options.scale == "std" or store.normalised:
            mean, std = self._statistics(store)
            shift, unit = mean.view(shape), std.view(shape)
            if options.scale == "std":
                unit = unit / self.sigma_data
        elif not scaled:
            if factor is None:
                raise DataError(
                    f"{options.path} is {store.layout}, which names no scale factor; set "
                    "data.scale_factor (Stable Diffusion's VAE: 0.18215) or data.scale=std"
                )
            shift, unit = shift + store.shift_factor, unit / factor
        self._shift, self._unit = shift.to(self.device), unit.to(self.device)
        self.decoding = Decoding(
            shift=tuple(shift.flatten().tolist()),
            unit=tuple(unit.flatten().tolist()),
            scaled=scaled,
            factor=factor,
            offset=store.shift_factor,
            vae=store.vae,
            text_encoder=store.text_encoder if self.task == "text" else None,
        )

    def _statistics(self, store: Store) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation per channel, measured if the store lacks them."""
        if store.mean is not None and store.std is not None:
            return store.mean, store.std
        count = min(store.count, _STATISTICS_SAMPLES)
        index = torch.arange(count) * store.count // count
        rows = store.latents(index).double()
        mean, variance = rows.mean((0, 2, 3)), rows.var((0, 2, 3), correction=0)
        if store.kind == "moments":  # the variance of the means, plus the mean variance
            mean, _ = mean.chunk(2)
            variance = variance.chunk(2)[0] + rows.chunk(2, 1)[1].exp().mean((0, 2, 3))
        require(
            bool((variance > 0).all()),
            f"{self.options.path} has a constant channel; data.scale=std cannot scale it",
        )
        return mean.float(), variance.sqrt().float()

    def rows(self, index: Tensor, draws: Draws | None, split: str = "train") -> Rows:
        """Read latents, and labels or captions; flips are drawn here, as they may be stored."""
        positions, store = self._positions(index, split)
        flip = torch.zeros(len(positions), dtype=torch.bool)
        # On the CPU, and in another thread: numbers drawn on a GPU would wait for its work.
        cpu_draws = draws.on("cpu") if draws is not None and split == "train" else None
        if cpu_draws is not None and self.options.flip != "none":
            flip = cpu_draws.uniform("flip", 1)[:, 0] < 0.5
        use_stored_flips = self.options.flip == "auto" and store.has_flips
        tensors, captions = self._conditions(positions, store, cpu_draws)
        tensors["latents"] = store.latents(positions, flip if use_stored_flips else None)
        self._check_finite(tensors["latents"], positions)
        if self.options.flip == "mirror":
            tensors["mirror"] = flip
        return Rows(tensors, captions)

    def _check_finite(self, latents: Tensor, positions: Tensor) -> None:
        """Warn once of latents that are not finite: their steps change no weights."""
        finite = latents.isfinite().flatten(1).all(1)
        if not (finite.all() or self._warned):
            self._warned = True
            warnings.warn(
                f"{self.options.path}: sample {int(positions[~finite][0])} is not finite; steps "
                "with such latents are skipped: make the store again",
                stacklevel=2,
            )

    def _positions(self, index: Tensor, split: str) -> tuple[Tensor, Store]:
        """Return the rows in its store of samples `index` of a split."""
        index = index.cpu()
        self._check(index, split)
        return self._rows[split][index], self._stores[split]

    def _conditions(
        self, positions: Tensor, store: Store, draws: Draws | None
    ) -> tuple[dict[str, Tensor], list[str] | None]:
        """Return labels `y`, or caption embeddings `text` and captions, of rows of a store."""
        if self.task == "class" and store.labels is not None:
            return {"y": store.labels[positions]}, None
        if self.task == "text" and store.text is not None:
            caption_number = torch.zeros(len(positions), dtype=torch.int64)
            if draws is not None:
                caption_number = (draws.uniform("caption", 1)[:, 0] * store.text[0]).long()
            text, captions = store.text_rows(positions, caption_number)
            return {"text": text}, captions
        return {}, None

    def condition(self, index: Tensor, split: str = "test") -> Condition:
        """Return labels or first captions of samples `index` (B,) without reading latents."""
        tensors, captions = self._conditions(*self._positions(index, split), None)
        on_device = {name: tensor.to(self.device) for name, tensor in tensors.items()}
        return Condition(**on_device, captions=captions)

    def batch(self, index: Tensor, draws: Draws | None = None, split: str = "train") -> Batch:
        """Return latents in model space."""
        return self.assemble(self.rows(index, draws, split), index, draws, split)

    def assemble(self, rows: Rows, index: Tensor, draws: Draws | None, split: str) -> Batch:
        """Return latents in model space.

        Without `draws` (references, previews) there are no flips, the first caption is used and the
        noise of moments depends on the sample alone.
        """
        tensors = {}
        for name, tensor in rows.tensors.items():
            tensors[name] = tensor.to(self.device, non_blocking=True)
        z = tensors["latents"].float()
        if self._stores[split].kind == "moments":
            z = sample_moments(z, draws or Draws(0, 0, index, self.device), "moments")
        if "mirror" in tensors:
            z = torch.where(tensors["mirror"].view(-1, 1, 1, 1), z.flip(-1), z)
        x = (z - self._shift) / self._unit
        return Batch(x, tensors.get("y"), tensors.get("text"), rows.captions)

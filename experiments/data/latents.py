"""Latents on disk as a data set, and without the disk: how latents become pixels and captions.

A stored row is a sample z of the autoencoder's posterior, or its moments (m, log s^2), from which
each step samples anew: z = m + s n. The model sees x = (z - a) / b with two numbers per channel:
the VAE's shift and scale factor, or the data's mean and standard deviation. Weights are sampled on
machines that never saw the store they were trained on, so an exported file carries these few
numbers and names.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.data.data_options import DataError, require
from experiments.data.dataset import Batch, Condition, Dataset, Device, Rows, SampleOrder
from experiments.data.encoders import DEFAULT, Autoencoder, TextEncoder, sample_moments, why_not
from experiments.data.latent_store import Store, open_store
from experiments.data.latents_spec import LatentsOptions, first_class_empty
from experiments.options.fields import build
from routing.rng import Draws

# Options that change the pictures of a split while the store stays.
_PIXELS = ("held_out", "kind", "scaled", "scale_factor", "vae", "vae_dtype")


@dataclass(frozen=True)
class Decoding:
    """The way from model space x to the autoencoder's latents z = x unit + shift, JSON-able."""

    shift: tuple[float, ...]  # one number per channel
    unit: tuple[float, ...]  # one number per channel
    scaled: bool = False  # whether z is still multiplied by `factor` (samples that were stored so)
    factor: float | None = None  # the autoencoder's scale factor, or None where nothing names one
    offset: float = 0.0  # its shift factor
    vae: str | None = None  # its name or folder, or None
    text_encoder: str | None = None  # name of what embeds captions, or None


class LatentSpace(Dataset):
    """Latents that are not here: they can be shown and asked for, not read.

    Of the options, those of a store are not looked at.
    """

    options: LatentsOptions
    decoding: Decoding

    def _open(self) -> None:
        super()._open()
        # The store or the weights say, not the options.
        self.num_classes, self.text = 0, None

    @classmethod
    def restore(
        cls,
        options: LatentsOptions,
        info: Mapping[str, Any],
        task: str = "class",
        device: Device = "cpu",
    ) -> LatentSpace:
        """Return the space of weights whose data set described itself by `info`."""
        self = cls(options, task, device)
        try:
            channels, height, width = map(int, info["shape"])
            self.shape = channels, height, width
            self.num_classes, self.fingerprint = int(info["num_classes"]), str(info["fingerprint"])
            self.class_names = tuple(map(str, info["class_names"]))
            self.text = (int(info["text"][0]), int(info["text"][1])) if info["text"] else None
            self.decoding = how = build(Decoding, info["decoding"])
            numbers = (*how.shift, *how.unit, how.offset, how.factor or 1.0)
            good = len(how.shift) == len(how.unit) == channels and how.factor != 0
            require(good and all(map(math.isfinite, numbers)), "numbers that decode nothing")
        except (TypeError, ValueError, KeyError, IndexError, OverflowError):
            raise DataError(
                "the weights do not say how their latents become pixels (damaged metadata); "
                "give the store they were trained on: data.path=FOLDER"
            ) from None
        return self

    def describe(self) -> dict[str, Any]:
        """Return how these latents are decoded, as `restore` reads it."""
        return {"decoding": {**dataclasses.asdict(self.decoding), "vae": self.vae}}

    def batch(self, index: Tensor, draws: Draws | None = None, split: str = "train") -> Batch:
        """Refuse: there are no samples."""
        raise DataError("the latents themselves are not here; give their store: data.path=FOLDER")

    @property
    def vae(self) -> str | None:
        """Name or folder of the autoencoder that turns these latents into pixels."""
        if self.options.vae != "auto":
            return self.options.vae
        return self.decoding.vae or (DEFAULT if self.shape[0] == 4 else None)

    @property
    def pixels_fingerprint(self) -> str:
        """The store's, with the options that show it in another way or split it elsewhere."""
        chosen = {key: getattr(self.options, key) for key in _PIXELS}
        said = {k: v for k, v in chosen.items() if v != getattr(LatentsOptions, k)}
        digest = hashlib.sha256(repr(said).encode()).hexdigest()[:8]
        return f"{self.fingerprint}-{digest}" if said else self.fingerprint

    @property
    def cannot_decode(self) -> str:
        """Why latents cannot be shown as pixels here; empty if they can."""
        return "" if "_codec" in vars(self) else why_not(self.vae)

    def to_pixels(self, x: Tensor) -> Tensor:
        """Decode model space (B, C, H, W) into uint8 RGB (B, 3, 8 H, 8 W) with the VAE."""
        how = self.decoding
        both = (how.shift, how.unit)
        shift, unit = (torch.tensor(v, device=self.device).view(-1, 1, 1) for v in both)
        z = x.to(self.device).float() * unit + shift
        if how.scaled:
            if how.factor is None:
                raise DataError("scaled latents need data.scale_factor to be decoded")
            z = z / how.factor + how.offset
        return torch.cat([self._codec.decode(part) for part in z.split(self.options.decode_batch)])

    @functools.cached_property
    def _codec(self) -> Autoencoder:
        require(not self.cannot_decode, f"no pixels: {self.cannot_decode}")
        made = Autoencoder(str(self.vae), self.device, getattr(torch, self.options.vae_dtype))
        has = f"the VAE {self.vae} has {made.channels} channels and the latents {self.shape[0]}"
        require(made.channels == self.shape[0], f"{has}; set data.vae to the one that made them")
        return made

    @functools.cached_property
    def _encoder(self) -> TextEncoder:
        assert self.text and self.decoding.text_encoder
        return TextEncoder(self.decoding.text_encoder, self.device, self.text[0])

    def encode_text(self, captions: Sequence[str]) -> Tensor:
        """Embed captions with the text encoder that the store was prepared with."""
        if self.text is None or self.decoding.text_encoder is None:
            return super().encode_text(captions)
        return self._encoder(captions)


# diffusers' `scaling_factor` of Stable Diffusion's first VAE, which foreign 4-channel latents are.
SD_SCALE = 0.18215
_HELD_OUT_SEED = 0x7EAD
_STATISTICS_FROM = 2048
# Each has a name and a row of the model's embedding.
_MOST_CLASSES = 1 << 20


class Latents(LatentSpace):
    """A latent store, and a second one or a part of it as held-out split."""

    reads_disk = True

    def _open(self) -> None:
        super()._open()
        options, task = self.options, self.task
        options.check()
        assert options.path
        store = open_store(options.path, kind=options.kind, verify=options.verify)
        self._stores = {"train": store}
        # Rows of the store that a split has; a split that is not named has all of them.
        self._ids: dict[str, Tensor] = {}
        self.shape = store.shape
        if options.test:
            test = self._stores["test"] = open_store(
                options.test, kind=options.kind, verify=options.verify
            )
            alike: dict[str, list[Any]] = {"shape": [one.shape for one in (test, store)]}
            if task == "text" and store.text and test.text:
                alike["shape of captions"] = [test.text[1:], store.text[1:]]
            if options.scaled == "auto":
                said = ("latents as its VAE makes them", "scaled latents")
                alike["scale (data.scaled=yes|no)"] = [said[one.scaled] for one in (test, store)]
            if test.scale_factor and store.scale_factor:
                alike["scale factor of the VAE"] = [test.scale_factor, store.scale_factor]
            for what, (second, first) in alike.items():
                held = f"data.test={options.test} holds {second} and data.path {first}"
                require(second == first, f"{held}; both must have one {what}")
        elif options.held_out:
            count, whole = options.held_out, store.count
            nothing = f"data.held_out={count} leaves nothing of {whole} samples to train on"
            require(count < whole, nothing)
            order = SampleOrder(_HELD_OUT_SEED, whole).lookup(torch.arange(whole))
            self._stores["test"] = store
            self._ids = {"test": order[:count].sort()[0], "train": order[count:].sort()[0]}
        self.sizes = {split: one.count for split, one in self._stores.items()}
        self.sizes |= {split: len(ids) for split, ids in self._ids.items()}
        for split, one in self._stores.items():
            self._require(one, options.test if split == "test" and options.test else options.path)
        self._affine(store)
        self.fingerprint = store.fingerprint
        if options.test:
            self.fingerprint += f"-{self._stores['test'].fingerprint}"

    def _require(self, store: Store, path: str) -> None:
        """Refuse a store that lacks what the task asks for; take over classes and captions."""
        lacks = f"{path} is {store.layout} without"
        if self.task == "text":
            how = "use task=class, or prepare it with --captions and --text"
            require(store.text is not None, f"{lacks} captions; {how}")
            self.text = store.text[1:] if store.text else None
        if self.task != "class":
            return
        how = "use task=none, or store a label (cls) with every latent"
        require(store.labels is not None, f"{lacks} labels; {how}")
        assert store.labels is not None
        named = self._stores["train"].classes
        low, high = int(store.labels.min()), int(store.labels.max())
        require(high < _MOST_CLASSES, f"{path} has label {high}, which is damage; mend the store")
        # Where one list goes on with the other, or knows none of its names, the numbers say it.
        alike = named[: len(store.classes)] == store.classes[: len(named)]
        known = {name: number for number, name in enumerate(named)}
        if not alike and known.keys() & {*store.classes} and 0 <= low <= high < len(store.classes):
            found = [store.classes[number] for number in store.labels.unique()]
            strange = [name for name in found if name not in known]
            lacking = f"{path} has classes that {self.options.path} lacks, such as {strange[:1]}"
            require(not strange, f"{lacking}; leave them out where it is prepared")
            numbers = torch.tensor([known.get(name, -1) for name in store.classes])
            store.labels = numbers[store.labels]
            high = int(store.labels.max())
        self.num_classes = self.options.num_classes or len(named) or self.num_classes or high + 1
        strange_one = f"label {low if low < 0 else high}, outside 0..{self.num_classes - 1}"
        mend = f"set data.num_classes={high + 1}, or mend the store"
        require(0 <= low <= high < self.num_classes, f"{path} has {strange_one}; {mend}")
        if low > 0 and store is self._stores["train"]:
            warnings.warn(first_class_empty(f"{path}: its", low), stacklevel=2)
        self.class_names = named or tuple(str(k) for k in range(self.num_classes))

    def _affine(self, store: Store) -> None:
        options = self.options
        # `auto`: samples of other projects' stores come scaled, as the TREAD release expects them.
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
        shifts, units = (tuple(part.flatten().tolist()) for part in (shift, unit))
        encoder = store.text_encoder if self.task == "text" else None
        self.decoding = Decoding(
            shifts, units, scaled, factor, store.shift_factor, store.vae, encoder
        )

    def _statistics(self, store: Store) -> tuple[Tensor, Tensor]:
        if store.mean is not None and store.std is not None:
            return store.mean, store.std
        count = min(store.count, _STATISTICS_FROM)
        index = torch.arange(count) * store.count // count
        rows = store.latents(index).double()
        mean, variance = rows.mean((0, 2, 3)), rows.var((0, 2, 3), correction=0)
        if store.kind == "moments":  # of each channel, then of its noise
            mean, _ = mean.chunk(2)
            variance = variance.chunk(2)[0] + rows.chunk(2, 1)[1].exp().mean((0, 2, 3))
        constant = f"{self.options.path} has a constant channel; data.scale=std cannot scale it"
        require(bool((variance > 0).all()), constant)
        return mean.float(), variance.sqrt().float()

    def rows(self, index: Tensor, draws: Draws | None, split: str = "train") -> Rows:
        """Read latents, labels, captions; flips are drawn here, for flipped rows may be stored."""
        at, store = self._find(index, split)
        flip = torch.zeros(len(at), dtype=torch.bool)
        # On the CPU, and in another thread: numbers drawn on a GPU would wait for its work.
        random = draws.on("cpu") if draws is not None and split == "train" else None
        if random is not None and self.options.flip != "none":
            flip = random.uniform("flip", 1)[:, 0] < 0.5
        stored = self.options.flip == "auto" and store.has_flips
        tensors, captions = self._asked(at, store, random)
        tensors["latents"] = store.latents(at, flip if stored else None)
        if self.options.flip == "mirror":
            tensors["mirror"] = flip
        return Rows(tensors, captions)

    def _find(self, index: Tensor, split: str) -> tuple[Tensor, Store]:
        """Return the rows of samples `index` of a split in its store."""
        index = index.cpu()
        self._check(index, split)
        at = self._ids[split][index] if split in self._ids else index
        return at, self._stores[split]

    def _asked(
        self, at: Tensor, store: Store, random: Draws | None
    ) -> tuple[dict[str, Tensor], list[str] | None]:
        """Return labels `y` or caption embeddings `text` of rows `at`, and captions in words."""
        if self.task == "class" and store.labels is not None:
            return {"y": store.labels[at]}, None
        if self.task == "text" and store.text is not None:
            which = torch.zeros(len(at), dtype=torch.int64)
            if random is not None:
                which = (random.uniform("caption", 1)[:, 0] * store.text[0]).long()
            text, captions = store.text_rows(at, which)
            return {"text": text}, captions
        return {}, None

    def condition(self, index: Tensor, split: str = "test") -> Condition:
        """Return labels or first captions of samples `index` (B,) without reading latents."""
        found, captions = self._asked(*self._find(index, split), None)
        put = {key: tensor.to(self.device) for key, tensor in found.items()}
        return Condition(**put, captions=captions)

    def batch(self, index: Tensor, draws: Draws | None = None, split: str = "train") -> Batch:
        """Return latents in model space."""
        return self.assemble(self.rows(index, draws, split), index, draws, split)

    def assemble(self, rows: Rows, index: Tensor, draws: Draws | None, split: str) -> Batch:
        """Return latents in model space.

        Without `draws` (references, previews) there are no flips, the first caption is taken and
        the noise of moments depends on the sample alone.
        """
        put = {k: v.to(self.device, non_blocking=True) for k, v in rows.tensors.items()}
        z = put["latents"].float()
        if self._stores[split].kind == "moments":
            z = sample_moments(z, draws or Draws(0, 0, index, self.device), "moments")
        if "mirror" in put:
            z = torch.where(put["mirror"].view(-1, 1, 1, 1), z.flip(-1), z)
        x = (z - self._shift) / self._unit
        return Batch(x, put.get("y"), put.get("text"), rows.captions)

"""Our own weights: one safetensors file with the model's arguments in its metadata.

    model.save_pretrained("folder")          Backbone.from_pretrained("folder")
    model.push_to_hub("user/name")           Backbone.from_pretrained("user/name")

`from_pretrained` also takes a run's folder, or a safetensors file in it. Nothing is ever unpickled.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelHubMixin, hf_hub_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from backbones.sizes import BackboneError, parse_size
from routing.errors import suggest
from routing.parsing import json_of

FORMAT = "tread-suite/1"
# 4096 x 4096: a table of positions beyond that is a mistake in the file.
_LARGEST_INPUT = 4096**2
FILE = "model.safetensors"
_REPOSITORY = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?(?<!\.safetensors)")
_OPTIONS = ("revision", "cache_dir", "token", "local_files_only", "force_download")


def write(path: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Write weights with a model's `config`, the arguments of `create`, in the metadata."""
    whole = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    save_file(whole, path, metadata={"format": FORMAT, "model": json.dumps(config)})


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the weights of a file that `write` or a run wrote, and the arguments of `create`.

    Raises:
        BackboneError: It is not a whole safetensors file, or does not say what model it holds.
    """
    try:
        with safe_open(path, framework="pt") as handle:
            metadata = handle.metadata() or {}
            tensors = {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise BackboneError(f"{path} is not a whole safetensors file: {error}") from error
    if metadata.get("format") != FORMAT or "model" not in metadata:
        raise BackboneError(
            f"{path} does not say what model it holds; weights of other projects load through "
            "backbones.import_weights.load"
        )
    try:
        return tensors, dict(json_of(metadata["model"]))
    except (TypeError, ValueError) as error:
        raise BackboneError(f"the metadata of {path} is damaged: {error}") from error


class Pretrained(ModelHubMixin):
    """Saving to and loading from a folder or the Hugging Face hub (a mixin of `Backbone`)."""

    def _save_pretrained(self, save_directory: Path) -> None:
        write(save_directory / FILE, self.state_dict(), self.config)  # type: ignore[attr-defined]
        text = json.dumps(self.config, indent=2)  # type: ignore[attr-defined]
        (save_directory / "config.json").write_text(text)

    def generate_model_card(self, *args: Any, **kwargs: Any) -> Any:
        """Return a card that says how to load the model."""
        name, size = self.config["name"], self.config["size"]  # type: ignore[attr-defined]
        return ModelCard(
            "---\nlibrary_name: tread-suite\n---\n"
            f"# {name} {size}\n\n"
            '    from backbones import Backbone\n    model = Backbone.from_pretrained("...")\n'
        )

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, name: str | Path, **options: Any
    ) -> Any:
        """Load a model, in evaluation mode.

        Args:
            name: A folder that holds a `model.safetensors`, that file, or a repository of the hub.
            **options: `revision`, `cache_dir`, `token`, `local_files_only` and `force_download`.

        Raises:
            BackboneError: There is no such file or folder; the file is damaged, or does not say
                what model it holds; an option that there is not.
        """
        path, known = Path(name), _REPOSITORY.fullmatch(str(name))
        if path.is_dir():
            path, known = path / FILE, None
        if not path.is_file() and not known:
            raise BackboneError(
                f"{name} is no weights file, no folder with {FILE} in it and no repository of the "
                "hub, such as name/model"
            )
        for key in options:
            if key not in _OPTIONS:
                raise BackboneError(
                    f"from_pretrained has no option {key!r}: its options are {', '.join(_OPTIONS)}"
                    + suggest(key, _OPTIONS)
                )
        if not path.is_file():
            path = Path(hf_hub_download(repo_id=str(name), filename=FILE, **options))
        tensors, config = read(path)
        return cls.from_tensors(config, tensors, str(path)).eval()

    @classmethod
    def from_tensors(
        cls, config: dict[str, Any], tensors: Mapping[str, Tensor], source: str
    ) -> Any:
        """Build the model that a file, `source`, describes and load the weights beside that.

        It is built without memory first: a file of kilobytes that describes terabytes is refused.

        Raises:
            BackboneError: No description of a model, or one that the weights do not fit.
        """
        wanted = cls._shapes(config, len(tensors), source)
        found = {key: value.shape for key, value in tensors.items()}
        wrong = sorted(k for k in wanted.keys() | found.keys() if wanted.get(k) != found.get(k))
        if wrong:
            raise BackboneError(
                f"the weights in {source} do not fit its own description: {', '.join(wrong)}"
            )
        with torch.random.fork_rng(devices=[]):
            model: Any = cls(**config)
        model.load_state_dict(dict(tensors))
        return model

    @classmethod
    def _shapes(cls, config: dict[str, Any], tensors: int, source: str) -> dict[str, torch.Size]:
        """Return the shapes of the weights that a description asks for, without making them."""
        try:
            asked = (config.get(key) for key in ("depth", "width", "heads"))
            size = parse_size(config.get("size", "S/2"), *asked)
            side = config.get("input_size", 32)
            area = side**2 if isinstance(side, int) else math.prod(map(int, side))
            if size.depth > max(tensors, 256) or area > _LARGEST_INPUT:
                raise BackboneError(
                    f"{source} does not fit its own description: {size.depth} blocks over an input "
                    f"of {side} in {tensors} tensors"
                )
            with torch.device("meta"):
                model: Any = cls(**config)
            return {key: value.shape for key, value in model.state_dict().items()}
        except BackboneError:
            raise
        except Exception as error:
            # Whatever a value of the wrong type makes a constructor trip over.
            reason = " ".join(str(error).split())[:200]
            raise BackboneError(f"{source} does not describe its model: {reason}") from error

"""Our own weights: one safetensors file with the model's arguments in its metadata.

    model.save_pretrained("folder")          Backbone.from_pretrained("folder")
    model.push_to_hub("user/name")           Backbone.from_pretrained("user/name")

`from_pretrained` also takes a run's folder, or a safetensors file in it. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub import ModelHubMixin, hf_hub_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from backbones.sizes import BackboneError

FORMAT = "tread-suite/1"
FILE = "model.safetensors"


def write(path: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Write weights with the arguments of `backbones.create` in the metadata.

    Args:
        path: File to write.
        tensors: Names and weights.
        config: A model's `config`.
    """
    whole = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    save_file(whole, path, metadata={"format": FORMAT, "model": json.dumps(config)})


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return weights and the arguments of `backbones.create`.

    Args:
        path: A safetensors file that `write`, or a run of this suite, wrote.

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
            "backbones.weights.load"
        )
    try:
        return tensors, dict(json.loads(metadata["model"]))
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
        from huggingface_hub import ModelCard

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
            BackboneError: The file is damaged, or does not say what model it holds.
        """
        return (
            _model(Path(name)) if Path(name).is_file() else super().from_pretrained(name, **options)
        )

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        revision: str | None,
        cache_dir: str | Path | None,
        force_download: bool,
        local_files_only: bool,
        token: str | bool | None,
        **kwargs: Any,
    ) -> Any:
        path = Path(model_id) / FILE
        if not path.is_file():
            path = Path(
                hf_hub_download(
                    repo_id=model_id,
                    filename=FILE,
                    revision=revision,
                    cache_dir=cache_dir,
                    force_download=force_download,
                    local_files_only=local_files_only,
                    token=token,
                )
            )
        return _model(path)


def _model(path: Path) -> Any:
    from backbones.registry import create

    tensors, config = read(path)
    try:
        model = create(**config)
        model.load_state_dict(tensors)
    except (TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise BackboneError(f"{path} does not fit its own description: {reason}") from error
    return model.eval()

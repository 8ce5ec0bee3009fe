"""Our own weights: one safetensors file with the model's arguments in its metadata.

    model.save_pretrained("folder")          Backbone.from_pretrained("folder")
    model.push_to_hub("user/name")           Backbone.from_pretrained("user/name")

`from_pretrained` also takes a run's folder, or a safetensors file in it.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import (
    ModelHubMixin,
    constants,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
)
from huggingface_hub.utils import HfHubHTTPError
from torch import Tensor

from backbones.cost import model_cost
from backbones.registry import model_config
from backbones.sizes import BackboneError
from backbones.weights.files import FILE, read, write
from routing.errors import one_of, require

_REPOSITORY = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?(?<!\.safetensors)")
_TIMEOUT_S = 10
_OPTIONS = ("revision", "cache_dir", "token", "local_files_only", "force_download")


def hub_problem(
    name: str, file: str, revision: str | None = None, token: bool | str | None = None
) -> str:
    """Ask the hub once for a repository's file; return why it is unavailable, or "".

    Without a network, the hub's own download retries for 40 seconds, then blames the repository.
    """
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        url = hf_hub_url(name, file, revision=revision)
        get_hf_file_metadata(url, token=token, timeout=_TIMEOUT_S)
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "an error")
        return f"the Hugging Face hub gives no {file} of {name} (HTTP {status})"
    except Exception as error:  # requests' or httpx's, depending on the version of huggingface_hub
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        return f"the Hugging Face hub cannot be reached ({reason})"
    return ""


def _download(name: str, options: dict[str, Any]) -> Path:
    """Return a repository's weights file, from the hub or from the local cache without a network.

    Raises:
        BackboneError: Neither has it.
    """
    problem = ""
    if not options.get("local_files_only"):
        problem = hub_problem(name, FILE, options.get("revision"), options.get("token"))
    if problem:
        options = {**options, "local_files_only": True, "force_download": False}
    try:
        return Path(hf_hub_download(repo_id=name, filename=FILE, **options))
    except (OSError, ValueError) as error:
        reason = problem or " ".join(str(error).split())[:200]
        raise BackboneError(
            f"{name}: {reason}, and the local cache does not hold its {FILE}; give a folder, or "
            "the name of a repository that you can reach"
        ) from None


class Pretrained(ModelHubMixin):
    """Saving to and loading from a folder or the Hugging Face hub (a mixin of `Backbone`)."""

    def _save_pretrained(self, save_directory: Path) -> None:
        write(save_directory / FILE, self.state_dict(), self.config)  # type: ignore[attr-defined]
        text = json.dumps(self.config, indent=2)  # type: ignore[attr-defined]
        (save_directory / "config.json").write_text(text)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, name: str | Path, **options: Any
    ) -> Any:
        """Load a model, in evaluation mode.

        Args:
            name: A folder that holds a `model.safetensors`, that file, or a repository of the hub.
            **options: `revision`, `cache_dir`, `token`, `local_files_only` and `force_download`.

        Raises:
            BackboneError: There is no such file, folder or repository, or the hub cannot be
                reached; the file is damaged, or does not say what model it holds; or an option is
                unknown.
        """
        path = Path(name)
        is_repository = _REPOSITORY.fullmatch(str(name)) is not None
        if path.is_dir():
            path, is_repository = path / FILE, False
        require(
            path.is_file() or is_repository,
            f"{name}: expected a weights file, a folder with {FILE} in it, or a repository of the "
            "hub, such as name/model",
            BackboneError,
        )
        for key in options:
            one_of("option", key, _OPTIONS, BackboneError)
        if not path.is_file():
            path = _download(str(name), options)
        tensors, config = read(path)
        return cls.from_tensors(config, tensors, str(path)).eval()

    @classmethod
    def from_tensors(
        cls, config: dict[str, Any], tensors: Mapping[str, Tensor], source: str
    ) -> Any:
        """Build the model that the file `source` describes and load its weights.

        Raises:
            BackboneError: No description of a model, or weights that do not fit it.
        """
        try:
            # A small file may describe a model of terabytes, so its parameters are counted first.
            arguments = model_config(**config)
            stored = sum(tensor.numel() for tensor in tensors.values())
            require(
                model_cost(arguments).params <= 2 * stored,
                "it describes a larger model",
                BackboneError,
            )
            with torch.random.fork_rng(devices=[]):
                model: Any = cls(arguments)  # type: ignore[call-arg]
            model.load_state_dict(dict(tensors))
        except Exception as error:
            # With values of the wrong type, a constructor can raise anything.
            reason = " ".join(str(error).split())[:400]
            raise BackboneError(f"{source} does not fit its own description: {reason}") from error
        return model

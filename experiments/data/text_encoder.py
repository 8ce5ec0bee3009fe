"""Caption embeddings from a CLIP or T5 text encoder of transformers: (B, L, E), L = 77 for CLIP."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from experiments.data.data_options import DataError, first_line

_KINDS = {"clip": "CLIPTextModel", "clip_text_model": "CLIPTextModel", "t5": "T5EncoderModel"}


class TextEncoder:
    """Captions to embeddings: the last hidden states, padded and cut to one length.

    `name` is a folder, or one on the hub (asked where `download` is set), of a CLIP or a T5 model
    with its tokenizer.
    """

    def __init__(
        self, name: str, device: torch.device | str, length: int, download: bool = False
    ) -> None:
        if importlib.util.find_spec("transformers") is None:
            raise DataError('transformers is not installed; pip install -e ".[data]"')
        import transformers

        folder = Path(name).expanduser()
        source = str(folder) if folder.is_dir() else name
        local = {"local_files_only": not download}
        try:
            kind = transformers.AutoConfig.from_pretrained(source, **local).model_type
            if kind not in _KINDS:
                raise DataError(f"{name} is a {kind} model; expected a CLIP or T5 text encoder")
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(source, **local)
            # Weights in safetensors only: the older .bin files are pickles.
            model = getattr(transformers, _KINDS[kind]).from_pretrained(
                source, use_safetensors=True, **local
            )
        except DataError:
            raise
        except Exception as error:
            raise DataError(
                f"the text encoder {name} cannot be loaded ({first_line(error)}); fetch it with "
                f"`hf download {name}`, or give a folder"
            ) from None
        # CLIP has learnt so many positions; T5's are relative.
        most = getattr(model.config, "max_position_embeddings", None) or length
        if length > most:
            raise DataError(f"the text encoder {name} reads {most} tokens at most, not {length}")
        self.name, self.length, self.device = name, length, torch.device(device)
        self.model = model.to(self.device).eval().requires_grad_(False)
        self.width = int(self.model.config.hidden_size)

    @torch.inference_mode()
    def __call__(self, captions: Sequence[str]) -> Tensor:
        """Return (B, L, E) float32; captions beyond L tokens are cut."""
        tokens = self.tokenizer(
            list(captions),
            padding="max_length",
            truncation=True,
            max_length=self.length,
            return_tensors="pt",
        ).to(self.device)
        output = self.model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])
        return output.last_hidden_state.float()

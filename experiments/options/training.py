"""Options of training, and the folders of a run (no torch here)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from backbones.validation import Choices
from experiments.options.roles import REPORTS, ROUTES, ConfigError
from routing.options import OMITTED_AT_DEFAULT

#: Frozen encoders that REPA can align to, and the width of their features.
ENCODERS = {
    "random": 64,
    "probe": 96,
    "dinov2-vits14": 384,
    "dinov2-vitb14": 768,
    "dinov2-vitl14": 1024,
}
#: The run's own EMA in place of a frozen encoder (SRA); its width is the model's.
SELF_ENCODER = "ema"
# Samples are counted in 64 bits: batch times steps must fit.
MOST_SAMPLES = 10**9
# OpenMP ends the process where it cannot start as many threads as it is asked for.
MOST_THREADS = 1024

Fraction = Annotated[float, Ge(0), Lt(1)]


@dataclass(frozen=True)
class TrainOptions:
    """Optimisation and bookkeeping of one run (TREAD: AdamW 1e-4, batch 256, EMA 0.9999)."""

    steps: Annotated[int, Ge(1), Le(MOST_SAMPLES), REPORTS, "Optimizer steps."] = 1000
    batch: Annotated[
        int, Ge(1), Le(MOST_SAMPLES), "Samples per optimizer step over all processes."
    ] = 64
    micro_batch: Annotated[
        Annotated[int, Ge(1)] | Literal["auto"] | None,
        REPORTS,
        "Samples per forward pass and process: null (all at once), a number, or auto (the largest "
        "that fits); the rest is accumulated.",
    ] = None
    optimizer: Annotated[
        Literal["adamw", "muon"],
        OMITTED_AT_DEFAULT,
        "adamw, or muon: Muon for the weights of linear layers in blocks, AdamW for the rest.",
    ] = "adamw"
    lr: Annotated[float, Gt(0), "Learning rate."] = 1e-4
    muon_lr: Annotated[
        Annotated[float, Gt(0)] | None,
        OMITTED_AT_DEFAULT,
        "Learning rate of Muon, whose updates are as large as AdamW's at the same rate; null: "
        "train.lr.",
    ] = None
    muon_momentum: Annotated[
        float, Ge(0), Lt(1), OMITTED_AT_DEFAULT, "Muon's (Nesterov) momentum."
    ] = 0.95
    warmup: Annotated[int, Ge(0), "Steps of linear warm-up."] = 0
    schedule: Annotated[
        Literal["constant", "cosine"],
        "Learning rate after the warm-up: constant, or cosine to zero at the last step.",
    ] = "constant"
    betas: Annotated[tuple[Fraction, Fraction], "AdamW's betas."] = (0.9, 0.999)
    eps: Annotated[float, Gt(0), "AdamW's epsilon."] = 1e-8
    weight_decay: Annotated[float, Ge(0), "Weight decay of AdamW and Muon."] = 0.0
    clip: Annotated[
        Annotated[float, Gt(0)] | None, "Largest gradient norm; null: no clipping, as in the paper."
    ] = None
    ema: Annotated[float, Ge(0), Lt(1), "Decay of the EMA of the weights, applied every step."] = (
        0.9999
    )
    label_drop: Annotated[
        float, Ge(0), Le(1), "Share of samples trained with the null class or empty text."
    ] = 0.1
    precision: Annotated[
        Literal["fp32", "bf16", "auto"],
        "fp32, bf16 (autocast) or auto: bf16 on CUDA from capability 8.0 and on CPUs with "
        "AVX512-BF16 or AMX, otherwise fp32.",
    ] = "fp32"
    residual: Annotated[
        Literal["fp32", "bf16"],
        OMITTED_AT_DEFAULT,
        "Type of the residual stream in training under bf16 (bf16: less memory traffic).",
    ] = "fp32"
    tf32: Annotated[bool, REPORTS, "Let CUDA matmuls round their fp32 inputs to TF32."] = True
    threads: Annotated[
        Annotated[int, Ge(1), Le(MOST_THREADS)] | None,
        REPORTS,
        "CPU threads; null: as torch or OMP_NUM_THREADS says.",
    ] = None
    compile: Annotated[
        Literal["none", "blocks"], REPORTS, "blocks: torch.compile on each block."
    ] = "none"
    graphs: Annotated[
        bool | Literal["auto"],
        REPORTS,
        "Replay each step as a CUDA graph, recorded once per route; auto: on a GPU with one "
        "process; true: with several as well, which has not been tested on several GPUs.",
    ] = "auto"
    log_every: Annotated[int, Ge(1), REPORTS, "Steps between lines of metrics."] = 10
    save_every: Annotated[int, Ge(1), REPORTS, "Steps between checkpoints."] = 200
    keep: Annotated[int, Ge(1), REPORTS, "Latest checkpoints that are kept."] = 2
    keep_every: Annotated[
        int, Ge(0), REPORTS, "Steps between checkpoints that are kept for good; 0: none."
    ] = 0
    sample_every: Annotated[
        int,
        Ge(0),
        REPORTS,
        "Steps between preview images (Euler, at most 8 steps); 0: only samples at the end.",
    ] = 0
    final_samples: Annotated[
        bool,
        REPORTS,
        OMITTED_AT_DEFAULT,
        "Write samples/final.png at the end, with the run's own sampler, also with eval=none; "
        "false: leave it out, and with sample_every=0 also the last preview and progress.gif.",
    ] = True
    max_bad_steps: Annotated[
        int, Ge(0), REPORTS, "Consecutive steps with a non-finite loss after which a run stops."
    ] = 20
    rollback: Annotated[
        int, Ge(0), REPORTS, "Times to return to the last checkpoint instead of stopping."
    ] = 0
    loss: Annotated[
        Literal["plain", "ensemble"],
        ROUTES,
        "plain: the objective on every token; ensemble: TREAD v1's mean over its routes of the "
        "loss on kept tokens plus mae_weight times the loss on skipped ones.",
    ] = "plain"
    mae_weight: Annotated[
        float,
        Ge(0),
        ROUTES,
        "Weight of the loss on skipped tokens (ensemble) or of MaskDiT's reconstruction.",
    ] = 0.1
    encoder: Annotated[
        str,
        Choices(("none", *ENCODERS, SELF_ENCODER)),
        ROUTES,
        "What a block's tokens are aligned to: a frozen encoder (REPA; random is a control, probe "
        "reads scenes, dinov2-vitb14 is REPA's), or ema, a later block of the run's own EMA (SRA).",
    ] = "none"
    align_weight: Annotated[float, Ge(0), ROUTES, "Weight of the alignment loss."] = 0.5
    align_loss: Annotated[
        Literal["cosine", "smooth_l1"],
        ROUTES,
        OMITTED_AT_DEFAULT,
        "Distance to the features: cosine: one minus the cosine (REPA; SRA's second form); "
        "smooth_l1: SRA's first, with beta 0.05, whose released weight is 0.2.",
    ] = "cosine"
    teacher_block: Annotated[
        Annotated[int, Ge(0)] | None,
        ROUTES,
        OMITTED_AT_DEFAULT,
        "Block of the EMA that train.encoder=ema aligns to; null: two thirds of the depth (the "
        "eighth of 12).",
    ] = None
    teacher_offset: Annotated[
        float,
        Ge(0),
        Lt(1),
        ROUTES,
        OMITTED_AT_DEFAULT,
        "The EMA sees the image less noisy by up to this much of flow matching's time (SRA: 0.2).",
    ] = 0.2

    def check_consistency(self) -> None:
        """Refuse options of an optimizer or a teacher that is not used."""
        if self.muon_lr is not None and self.optimizer != "muon":
            raise ConfigError(f"train.muon_lr={self.muon_lr}: expected train.optimizer=muon")
        if self.align_loss != "cosine" and self.encoder != SELF_ENCODER:
            raise ConfigError(
                f"train.align_loss={self.align_loss}: expected cosine, or "
                f"train.encoder={SELF_ENCODER}, whose features have the scale of the tokens"
            )
        if self.teacher_block is not None and self.encoder != SELF_ENCODER:
            raise ConfigError(
                f"train.teacher_block={self.teacher_block}: expected train.encoder={SELF_ENCODER}"
            )


@dataclass(frozen=True)
class PathsOptions:
    """Folders that a run reads and writes."""

    runs: Annotated[str, "Folder of the run folders."] = "runs"
    cache: Annotated[
        str | None, "Feature networks and reference statistics; null: the user's cache folder."
    ] = None

"""Diffusion: objectives, samplers and guidance (mathematics only).

An *objective* defines how data are corrupted, what the network predicts and how its output becomes
an estimate `D(x, time)` of the clean image. A *sampler* integrates from noise to data with nothing
but `D`. *Guidance* sits between them and makes one `D` out of several passes. So every sampler and
every guidance works with every objective and every backbone.
"""

from routing.lazy import lazily

__getattr__, __dir__, __all__ = lazily(
    __name__,
    {
        "objective": ("Objective", "Prediction"),
        "objectives": ("create_objective",),
        "samplers": ("Sampler", "create_sampler"),
        "guidance": ("Guidance", "create_guidance"),
    },
)

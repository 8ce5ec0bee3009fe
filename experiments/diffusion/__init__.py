"""Diffusion: objectives, samplers and guidance (mathematics only).

An *objective* defines how data are corrupted, what the network predicts and how its output becomes
an estimate `D(x, time)` of the clean image. A *sampler* integrates from noise to data with nothing
but `D`. *Guidance* sits between them and makes one `D` out of several passes. So every sampler and
every guidance works with every objective and every backbone.
"""

from experiments.runtime.lazy import lazily

_HOME = {
    "DiffusionError": "diffusion_options",
    "options_of": "diffusion_options",
    "Objective": "objective",
    "Prediction": "objective",
    "create_objective": "objective",
    "Sampler": "samplers",
    "create_sampler": "samplers",
    "Guidance": "guidance",
    "create_guidance": "guidance",
}
__all__ = sorted(_HOME)
__getattr__, __dir__ = lazily(__name__, _HOME)

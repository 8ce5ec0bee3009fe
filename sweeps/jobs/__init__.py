"""From runs to jobs: Slurm arrays or workers on this machine, and what they leave on disk."""

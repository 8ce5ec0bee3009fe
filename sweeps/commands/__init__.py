"""The commands of `python -m sweeps`: thin, one file for each or for a few."""

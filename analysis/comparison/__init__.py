"""Comparison of runs: seeds and variants, paired statistics, step penalties."""

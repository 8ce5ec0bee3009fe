"""From a grid to runs: cells, overrides, names, cost."""

"""From a grid file to planned runs: cells, configurations, names, steps, cost and resources."""

"""One training run: its loop, state, loss, checkpoints and what it reports."""

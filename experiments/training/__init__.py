"""One training run: its loop, step, state, loss and metrics."""

"""Tools of every command: files, locks, console, signals, memory. None of them knows diffusion."""

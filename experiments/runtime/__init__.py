"""Tools of every command: files, locks, console, signals, memory, processes; no diffusion."""

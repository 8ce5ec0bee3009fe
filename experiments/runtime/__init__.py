"""Tools of every command: errors, files, locks, records, console, signals, processes, memory."""

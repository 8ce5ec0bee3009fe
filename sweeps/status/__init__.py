"""Status of every run, from its folder, its events and the queue."""

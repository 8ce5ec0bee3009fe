"""A sweep on disk: its runs, submissions and events, the overrides and resources of each."""

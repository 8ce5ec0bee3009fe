"""Run folders and archives of them as data frames, and which of the runs are comparable."""

"""Run folders as data frames, and which of them may be compared."""

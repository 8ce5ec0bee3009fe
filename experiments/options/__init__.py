"""Option dataclasses of every group, without torch."""

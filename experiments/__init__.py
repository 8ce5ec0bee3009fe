"""The commands and the parts of one run: configure, train, sample, score."""

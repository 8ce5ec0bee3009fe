"""Routing for a model of another library: hooks on its blocks, no change of its code."""

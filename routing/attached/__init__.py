"""Routing for a model of somebody else's: its blocks are hooked, its code stays as it is."""

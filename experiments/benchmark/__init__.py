"""Measurements of speed and memory: steps, blocks, the loop around them."""

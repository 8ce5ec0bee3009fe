"""Families off the beaten path, under the same interface: GLA, Hydra, RWKV-6 and RWKV-7."""

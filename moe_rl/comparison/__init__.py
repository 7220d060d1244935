"""Compares sampler and trainer without and with routing replay, on the same weights, tokens and packing."""

"""Compares sampler and trainer, with and without routing replay, for the same weights, tokens and packing."""

"""Proves that a parallel layout replays exactly, against an independent single-process `transformers` model."""

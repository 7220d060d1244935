"""Proof that a layout replays exactly: the trained model against an independent single-process `transformers` model."""

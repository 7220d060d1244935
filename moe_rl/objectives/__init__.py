"""Holds the pure functions of training: advantages, policy losses, KL, and sampler-trainer mismatch."""

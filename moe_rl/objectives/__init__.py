"""What is optimised and measured: advantages, policy losses, KL, sampler-vs-trainer mismatch. Pure functions."""

"""Reward functions, and the process boundary they run behind."""

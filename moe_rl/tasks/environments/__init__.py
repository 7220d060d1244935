"""Runs environments, in which a model acts over many turns, each episode in its own process."""

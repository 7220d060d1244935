"""Logs what a run measures, and writes the pages that show it."""

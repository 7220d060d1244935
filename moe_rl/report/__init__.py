"""Logs the measurements of a run, and writes the pages that show them."""

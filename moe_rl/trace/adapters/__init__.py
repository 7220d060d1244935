"""Reads routes in the formats of other systems into the store."""

"""Routes as other systems send them, read into the store."""

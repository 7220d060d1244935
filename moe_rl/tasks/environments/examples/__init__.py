"""Shows environments to copy: a tool, a game, and a harness with a client of its own."""

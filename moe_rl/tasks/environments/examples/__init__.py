"""Shows environments to copy: a tool, a game, and a harness with its own client."""

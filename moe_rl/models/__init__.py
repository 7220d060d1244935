"""Model families: what config.json says, and how weights are named. One file a family, free of torch."""

"""What is decided before the step runs: which sequence goes to which update, rank and microbatch. Imports no torch."""

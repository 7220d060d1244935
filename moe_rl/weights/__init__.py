"""The way of new weights from the trainer to the samplers, both ends."""

"""Sends new weights from the trainer to the samplers; holds the code of both ends."""

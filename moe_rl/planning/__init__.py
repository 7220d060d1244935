"""Decides before a step which sequence goes to which update, rank and microbatch, and predicts memory. Imports no
torch.
"""

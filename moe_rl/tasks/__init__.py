"""Provides the task: prompts with their order and ledger, reward functions, and the processes that run these
functions.
"""

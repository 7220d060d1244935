"""What is trained on: prompts, their order and ledger, reward functions and the processes that they run in."""

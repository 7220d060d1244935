"""Holds everything that runs inside a vLLM process: recorder, hooks and server; also the patch series and its tool."""

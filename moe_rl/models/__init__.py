"""Describes model families: how config.json is read and how weights are named. One file per family, without torch."""

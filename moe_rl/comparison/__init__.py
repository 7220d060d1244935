"""Sampler against trainer, before and after routing replay: the same weights, tokens and packing, measured twice."""

"""Verifiers and shaping: from a completion to a number."""

"""Compiled sampling on a key-value cache."""

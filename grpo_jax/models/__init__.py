"""Flax NNX transformers, Hugging Face folders, and the doors for models of your own."""

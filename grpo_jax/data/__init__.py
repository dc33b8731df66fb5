"""From text to token-aligned batches."""

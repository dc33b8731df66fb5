"""The train step, its state, checkpoints and the loop."""

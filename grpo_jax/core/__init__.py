"""Pure maths: masks, log-probabilities, advantages and the loss. Imports jax, chex and flax.struct only."""

"""Pure maths: masks, log-probabilities, advantages, losses. Imports jax, chex, flax.struct only."""

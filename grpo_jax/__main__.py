"""`python -m grpo_jax` is `grpo-jax`."""

from grpo_jax.cli import main

raise SystemExit(main())

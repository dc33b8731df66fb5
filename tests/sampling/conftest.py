"""Programs here run once or twice: compiling them well would take four times as long."""

import jax
import pytest


@pytest.fixture(autouse=True)
def quick_compilation():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)

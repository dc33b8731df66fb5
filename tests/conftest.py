"""A strict session: silent broadcasts and deprecations are errors, and there are eight devices."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update(
    "jax_compilation_cache_dir",
    os.environ.get("GRPO_JAX_TEST_CACHE", os.path.join(os.path.dirname(__file__), "../.jax_cache")),
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def pytest_collection_modifyitems(items):
    """Leave out what takes many minutes, unless it is asked for."""
    if os.environ.get("GRPO_JAX_NIGHTLY") != "1":
        skip = pytest.mark.skip(reason="set GRPO_JAX_NIGHTLY=1 to run it")
        for item in items:
            if "nightly" in item.keywords:
                item.add_marker(skip)


@pytest.fixture
def x64():
    """Double precision for one test."""
    with jax.enable_x64(True):
        yield

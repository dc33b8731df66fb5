"""Our bin packing behind the interface of the conformance checker."""

from grpo_jax.data import packing


def pack(config):
    """Return the bins of one case."""
    return packing.pack(
        config["sequence_lengths"],
        config["bin_capacity"],
        config["algorithm"],
        min_bin_count=config["min_bin_count"],
        bin_count_multiple=config["bin_count_multiple"],
        seed=config.get("python_random_seed", 0),
    )


def check_packer_config(config):
    """Raise where a packer configuration must be rejected."""
    pack(config | {"sequence_lengths": [1]})

"""The interface of `check.py`; the functions of each family live in a file of their own."""

import importlib
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from adapter_loss import (  # noqa: E402, F401
    calculate_kl,
    check_kl_config,
    check_loss_config,
    config_defaults,
    loss_and_grad,
    masked_mean,
    setup,
)

_FAMILIES = {
    "adapter_logprobs": ("next_token_logprobs", "check_sampling_config"),
    "adapter_advantages": (
        "baseline_std",
        "advantage",
        "seq_error_filter",
        "advantage_clip",
        "check_gdpo_config",
        "check_opd_config",
    ),
    "adapter_rewards": ("reward_shaping", "reward_scaling", "check_reward_shaping_config"),
    "adapter_packing": ("pack", "check_packer_config"),
}

for _module, _names in _FAMILIES.items():
    if importlib.util.find_spec(_module) is not None:
        _loaded = importlib.import_module(_module)
        globals().update({n: getattr(_loaded, n) for n in _names if hasattr(_loaded, n)})


def check_config(kind, config):
    """Raise where the configuration must be rejected; `check_<kind>` of the family decides."""
    check = globals().get(f"check_{kind}")
    if check is None:
        raise NotImplementedError(kind)
    check(config)

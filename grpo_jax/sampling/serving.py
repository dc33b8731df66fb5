"""Where a server of completions listens, and what it takes on."""

import dataclasses
import ipaddress
import os
from typing import Literal


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    """What is served, where, and how much of it at one time.

    Raises:
      ValueError: a limit is not positive.
    """

    checkpoint: str | None = None
    """Run folder whose checkpoint is served; without it the model of the config is."""
    step: int | Literal["best"] | None = None
    """Step of the checkpoint, or `best` by checkpoint.metric; the newest one by default."""
    host: str = "127.0.0.1"
    """Address to listen on; another one than loopback needs a token."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    weights: str | None = None
    """Folder that clients may name new weights in; without it the weights stay."""
    token_variable: str = "GRPO_JAX_SERVE_TOKEN"
    """Environment variable with the token that clients must send."""
    max_body_mb: int = 8
    """Size of a request (MiB)."""
    max_waiting: int = 1024
    """Completions asked for and not yet returned; more are refused with status 429."""
    max_samplings: int = 32
    """Different temperatures, filters and minimum lengths; each compiles programs of its own."""

    def __post_init__(self):
        for name in ("max_body_mb", "max_waiting", "max_samplings"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")

    def token(self) -> str | None:
        """The token that clients must send.

        Raises:
          ValueError: there is none, and others than this machine can reach the server.
        """
        found = os.environ.get(self.token_variable) or None
        if found is None and not _is_loopback(self.host):
            raise ValueError(
                f"host = {self.host!r} can be reached from outside; put a secret into the "
                f"environment variable {self.token_variable}, or listen on 127.0.0.1"
            )
        return found


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

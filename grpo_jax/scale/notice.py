"""The platform's own notice that a machine is about to be taken away.

Kubernetes and Slurm send SIGTERM. A virtual machine of Google Cloud is told by its metadata server
before anything is sent to a process: `instance/preempted` turns TRUE, or
`instance/maintenance-event` names an event that ends it.
https://docs.cloud.google.com/compute/docs/instances/create-use-preemptible
"""

import os
import threading
import urllib.request
from collections.abc import Callable, Mapping

NOTICE = "preemption notice"
_EVERY = 5.0  # seconds between two questions; a notice comes 30 s before the end
_ENDS = {"preempted": "TRUE", "maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}


def metadata_host(environment: Mapping[str, str], on_tpu_vm: bool) -> str | None:
    """Where the metadata server is: Google's own variable, or its usual name on a Cloud TPU."""
    if "GCE_METADATA_HOST" in environment:
        return environment["GCE_METADATA_HOST"]
    if on_tpu_vm and "TPU_SKIP_MDS_QUERY" not in environment:
        return "metadata.google.internal"
    return None


class Watch:
    """Ask the metadata server in the background until it gives notice, or until closed."""

    def __init__(self, told: Callable[[str], None], host: str | None, every: float = _EVERY):
        """Begin, where there is a server to ask; `told` is given `NOTICE`, once."""
        self._told, self._host, self._every = told, host, every
        self._closed = threading.Event()
        if host is not None:
            threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self._closed.is_set():
            if any(self._read(name) == end for name, end in _ENDS.items()):
                return self._told(NOTICE)
            self._closed.wait(self._every)

    def _read(self, name: str) -> str:
        """What the server says; nothing where it does not answer, which a later question mends."""
        address = f"http://{self._host}/computeMetadata/v1/instance/{name}"
        request = urllib.request.Request(address, headers={"Metadata-Flavor": "Google"})
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return answer.read().decode().strip()
        except OSError:
            return ""

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()


def watch(told: Callable[[str], None]) -> Watch:
    """Watch for this machine's notice; does nothing elsewhere than on Google Cloud."""
    from jax._src.cloud_tpu_init import running_in_cloud_tpu_vm

    return Watch(told, metadata_host(os.environ, bool(running_in_cloud_tpu_vm)))

"""Ctrl-C, SIGTERM and the platform's notice ask for a clean end: finish the step, then save."""

import signal
from types import FrameType

from grpo_jax.scale import notice


class Interrupt:
    """Turn the first signal into a request and the second into the usual, immediate end.

    Use as a context manager around the loop; `requested` names the signal once one has come.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, say=print):
        self.requested: str | None = None
        self._say = say
        self._before: dict[int, object] = {}
        self._watch: notice.Watch | None = None

    def __enter__(self) -> "Interrupt":
        for number in self.SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        self._watch = notice.watch(self._ask)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._watch is not None:
            self._watch.close()
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        # SIGTERM follows the platform's notice, and must not cut off the save that it began.
        if self.requested not in (None, notice.NOTICE):
            raise KeyboardInterrupt
        self._ask(signal.Signals(number).name)

    def _ask(self, name: str) -> None:
        self.requested = name
        self._say(f"{name}: finishing this step, then saving. One more signal ends at once.")

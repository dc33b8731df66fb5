"""Ctrl-C and SIGTERM ask for a clean end: the step in hand is finished and saved first."""

import signal
from types import FrameType


class Interrupt:
    """Turn the first signal into a request and the second into the usual, immediate end.

    Use as a context manager around the loop; `requested` names the signal once one has come.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, say=print):
        self.requested: str | None = None
        self._say = say
        self._before: dict[int, object] = {}

    def __enter__(self) -> "Interrupt":
        for number in self.SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.requested is not None:
            raise KeyboardInterrupt
        self.requested = signal.Signals(number).name
        self._say(f"{self.requested}: finishing this step, then saving. Once more ends at once.")

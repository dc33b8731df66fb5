"""The first Ctrl-C is a request, the second ends at once."""

import os
import signal

import pytest

from grpo_jax.train.interrupt import Interrupt


def test_signals_become_requests_and_handlers_come_back():
    before, said = signal.getsignal(signal.SIGINT), []
    with Interrupt(said.append) as interrupt:
        assert interrupt.requested is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.requested == "SIGTERM"
        assert "finishing this step, then saving" in said[0]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before

"""The platform's notice, from a metadata server of this machine."""

import os
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from grpo_jax.scale import notice
from grpo_jax.train.interrupt import Interrupt


class Metadata(HTTPServer):
    """Answers as Google's does: text, and only to those who say the flavour."""

    def __init__(self):
        self.values = {"preempted": "FALSE", "maintenance-event": "NONE"}
        super().__init__(("127.0.0.1", 0), Answer)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        name = self.path.removeprefix("/computeMetadata/v1/instance/")
        known = self.headers["Metadata-Flavor"] == "Google" and name in self.server.values
        self.send_response(200 if known else 403)
        self.end_headers()
        self.wfile.write(self.server.values.get(name, "").encode() if known else b"")

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server():
    made = Metadata()
    yield made
    made.shutdown()
    made.server_close()


def wait_for(condition, limit=10.0):
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("name", "value"),
    [("preempted", "TRUE"), ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")],
)
def test_a_notice_is_told_once(server, name, value):
    told = []
    watch = notice.Watch(told.append, server.host, every=0.01)
    time.sleep(0.1)
    assert told == []
    server.values[name] = value
    wait_for(lambda: told)
    time.sleep(0.1)
    assert told == [notice.NOTICE]
    watch.close()


def test_a_server_that_does_not_answer_is_asked_again(server):
    told = []
    server.values = {}
    watch = notice.Watch(told.append, server.host, every=0.01)
    time.sleep(0.1)
    server.values = {"preempted": "TRUE"}
    wait_for(lambda: told)
    watch.close()


def test_the_signal_that_follows_a_notice_does_not_cut_off_the_save(server, monkeypatch):
    monkeypatch.setenv("GCE_METADATA_HOST", server.host)
    said = []
    server.values["preempted"] = "TRUE"
    with Interrupt(said.append) as interrupt:
        wait_for(lambda: interrupt.requested)
        assert interrupt.requested == notice.NOTICE and "then saving" in said[0]
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: interrupt.requested == "SIGTERM")
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)


@pytest.mark.parametrize(
    ("environment", "on_tpu_vm", "host"),
    [
        ({}, False, None),
        ({}, True, "metadata.google.internal"),
        ({"TPU_SKIP_MDS_QUERY": "1"}, True, None),
        ({"GCE_METADATA_HOST": "10.0.0.1:80"}, False, "10.0.0.1:80"),
    ],
)
def test_where_the_server_is(environment, on_tpu_vm, host):
    assert notice.metadata_host(environment, on_tpu_vm) == host

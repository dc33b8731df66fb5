"""A model by its name: a folder here, or the hub's where one is reachable. No network in here."""

import json

import huggingface_hub
import jax
import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from grpo_jax import config as configs
from grpo_jax import loading
from grpo_jax.models import hf, hf_config, hub, presets

NAME = "owner/Some-Model_1.5B"
SHAPE = presets.preset("tiny", num_layers=1)


@pytest.fixture
def asked(monkeypatch, tmp_path, draw):
    """A hub that has NAME; returns what it was asked for."""
    requests = []
    hf.save_model(tmp_path / "cached", SHAPE, draw(SHAPE))

    def download(name, allow_patterns):
        requests.append((name, allow_patterns))
        return str(tmp_path / "cached")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    hub.local_folder.cache_clear()
    yield requests
    hub.local_folder.cache_clear()


@pytest.fixture
def offline(monkeypatch):
    def unreachable(*arguments, **options):
        raise LocalEntryNotFoundError("An error happened while trying to locate\nthe files")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    hub.local_folder.cache_clear()


def test_a_name_is_downloaded_once_and_loads_as_a_folder_does(asked, draw):
    model = hf.load_model(NAME)
    jax.tree.map(np.testing.assert_array_equal, model.params, draw(SHAPE))
    assert hf_config.read_config(NAME).num_layers == 1
    ((name, patterns),) = asked
    assert name == NAME
    # No second copy of the weights in another format.
    assert not {"*", "*.safetensors", "*.bin", "*.pth", "*.gguf"} & set(patterns)


def test_a_run_is_given_weights_and_tokenizer_of_the_name(asked, tmp_path):
    config = configs.from_dict({"model": {"path": NAME}, "tokenizer": {"path": "bytes"}})
    model = loading.load_model(config)
    assert model.loaded.config.num_layers == 1
    assert loading.fingerprint(NAME) == loading.fingerprint(tmp_path / "cached")
    assert len(asked) == 1


def test_an_export_takes_the_tokenizer_of_the_name_along(asked, tmp_path, draw):
    (tmp_path / "cached" / "tokenizer.json").write_text(json.dumps({"a": 1}))
    hf.save_model(tmp_path / "out", SHAPE, draw(SHAPE), companions=NAME)
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_where_no_hub_is_reachable_one_error_says_what_to_do(offline):
    """One line, without the dozens that the libraries below say."""
    wanted = rf"^{NAME} is no folder here, and the hub did not give it: .*; name a folder"
    for read in (hf.load_model, hf_config.read_config, loading.fingerprint):
        with pytest.raises(FileNotFoundError, match=wanted) as caught:
            read(NAME)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "path", ["nowhere", "./owner/model", "../owner/model", "/owner/model", "a/b/c", "models/x y"]
)
def test_what_is_no_name_of_the_hub_is_a_folder_that_does_not_exist(offline, path):
    with pytest.raises(FileNotFoundError, match=f"model folder {path} does not exist"):
        hf.load_model(path)


def test_a_folder_that_is_there_is_never_looked_up(offline, tmp_path, monkeypatch, draw):
    monkeypatch.chdir(tmp_path)
    hf.save_model("owner/model", SHAPE, draw(SHAPE))
    assert hf.load_model("owner/model").config.num_layers == 1
    with pytest.raises(FileNotFoundError, match="model folder owner/modle does not exist"):
        hf.load_model("owner/modle")  # its neighbours are here: a slip of the pen

"""Who samples: the native engine, or a server that is given every new version of the weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_jax.config import Config, ConfigError
from grpo_jax.core.policy import Params
from grpo_jax.loading import Model, quiet
from grpo_jax.models import hf
from grpo_jax.models.model_config import ModelConfig
from grpo_jax.sampling.engine import EngineConfig, NativeEngine, RolloutEngine
from grpo_jax.sampling.serving import ServeConfig
from grpo_jax.scale import multihost, rules


def make_engine(config: Config, model: Model) -> RolloutEngine:
    """The engine that a config names.

    Raises:
      ConfigError: a server, and the packages that speak to it are not installed.
    """
    if config.engine.remote.url is None:
        return _native(config.engine, model)
    remote = _optional("remote")
    return remote.RemoteEngine(
        config.engine.remote,
        model.sampling,
        stop_ids=model.tokenizer.stop_ids,
        pad_id=model.tokenizer.pad_id,
        context_length=model.loaded.config.max_length,
        publish=_publisher(config, model.loaded.config),
    )


def _native(config: EngineConfig, model: Model) -> NativeEngine:
    mesh, table = model.mesh, model.rules  # by themselves: the model would keep its weights alive

    def place(prepared: Params) -> Any:
        # What does not divide was said when the weights were loaded.
        return rules.partition(prepared, mesh, table, say=quiet)

    return NativeEngine(
        model.loaded.decoder,
        model.sampling,
        stop_ids=model.tokenizer.stop_ids,
        pad_id=model.tokenizer.pad_id,
        context_length=model.loaded.config.max_length,
        config=config,
        mesh=mesh,
        place=place if mesh.size > 1 else None,
        decode=model.tokenizer.decode,
    )


def check_trainable(config: Config) -> None:
    """Refuse a server that would sample from other weights than are trained.

    Raises:
      ConfigError: it is not given new weights, or the config trains an adapter.
    """
    remote = config.engine.remote
    if remote.url is None:
        return
    if remote.weights is None:
        raise ConfigError(
            f"engine.remote.url = {remote.url!r} would sample from the same weights for the whole "
            "run; name a folder that the server can read in engine.remote.weights, and start it "
            "so that it accepts them (`grpo-jax serve CONFIG --weights FOLDER`)"
        )
    if config.lora.on:
        raise ConfigError(
            "engine.remote.url with lora.rank: the server would need the adapter merged at every "
            "step, which is not offered; train all weights, or sample with the native engine"
        )


def _publisher(config: Config, shape: ModelConfig) -> Callable[[Params, int], None] | None:
    """Write weights into the shared folder, and tell the server; None without a folder."""
    chosen = config.engine.remote
    if chosen.weights is None:
        return None
    folder, http = Path(chosen.weights).absolute(), _optional("http_client")

    def publish(params: Params, version: int) -> None:
        hf.save_model(folder, shape, params, companions=config.model.path)

        def hand_over() -> None:
            with http.make_client(chosen) as client:
                body = {"path": str(folder), "version": version}
                http.post(client, chosen, "/load_weights", body)

        multihost.from_main(hand_over, "the weights for the serving engine")

    return publish


def make_server(
    config: Config, options: ServeConfig, model: Model, params: Params
) -> tuple[Any, Any]:
    """The HTTP application, and the batcher behind it (to be closed at the end).

    Raises:
      ConfigError: the packages are not installed, or a limit is not positive.
    """
    server = _optional("server")
    token = options.token()
    shape = model.loaded.config
    engine = _native(config.engine, model)

    def load(path: str) -> Params:
        allowed = Path(str(options.weights)).resolve()
        if not Path(path).resolve().is_relative_to(allowed):
            raise ValueError(f"{path} is not in {allowed}, the folder this server reads from")
        return hf.load_params(path, shape)

    batcher = server.Batcher(engine, params, options)
    app = server.make_app(
        batcher,
        model.tokenizer,
        model=Path(config.model.path).name,
        context_length=shape.max_length,
        vocabulary=model.sampling.filter.vocabulary,
        token=token,
        limits=options,
        load=load if options.weights is not None else None,
    )
    return app, batcher


def _optional(name: str) -> Any:
    """Import a module of `sampling` whose packages are an extra."""
    try:
        return __import__(f"grpo_jax.sampling.{name}", fromlist=[name])
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the package {error.name} is not installed; `pip install 'grpo-jax[serve]'` brings "
            "what serving, and sampling on a server, need"
        ) from error

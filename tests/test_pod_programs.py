"""The train step of an 8B model as the TPU compiler makes it for a pod: what moves, what is held.

Needs jax[tpu], whose compiler runs without a TPU. `docs/pods.md` derives the ideal.
"""

import math
import re
from pathlib import Path

import jax
import pytest
import yaml

from grpo_jax import config as configs
from grpo_jax import plan
from grpo_jax.scale import chips, hlo
from grpo_jax.scale import mesh as meshes

RECIPES = {
    "qwen3_0.6b_one_chip": "v6e:1x1",
    "qwen3_8b_v5e_64": "v5e:8x8",
    "qwen3_8b_h200_8": "h200x8",
    "qwen3_30b_a3b_v5p_128": "v5p:4x4x4",
}
FOLDER = Path(__file__).parents[1] / "configs"
LAYERS, D, F, V, HEADS, KV, HD = 36, 4096, 12_288, 151_936, 32, 8, 128  # Qwen3-8B
FSDP, TENSOR, MICRO, WIDTH = 32, 8, 2, 2048


def qwen3_8b(fsdp: int, tensor: int, rows: int) -> configs.Config:
    return configs.from_dict(
        {
            "model": {"path": "Qwen/Qwen3-8B", "compute_dtype": "bfloat16", "remat": "full"},
            "data": {"max_prompt_tokens": 512},
            "sampling": {"max_new_tokens": 1536},
            "rollout": {
                "prompts_per_step": rows // 8,
                "completions_per_prompt": 8,
                "micro_batch_size": MICRO,
            },
            "mesh": {"fsdp": fsdp, "tensor": tensor},
        }
    )


@pytest.fixture(scope="module")
def compiled():
    """The text of the compiled step, what it holds, and the places of its state."""
    pytest.importorskip("libtpu", reason="needs jax[tpu]: its compiler runs without a TPU")
    config = qwen3_8b(FSDP, TENSOR, 256)
    mesh = meshes.make_mesh(config.mesh, chips.topology("v5e:16x16").devices)
    work = plan.updates(config, mesh)
    text = work.steps.train.lower(work.state, work.batch, work.counts).compile().as_text()
    return text, hlo.read(text, dict(mesh.shape), unknown_trips=work.trips), work.state


def arrays(text: str) -> set[tuple[int, ...]]:
    """The dimensions of every array that the program makes."""
    return {tuple(map(int, dims.split(","))) for dims in re.findall(r"\w+\[([\d,]+)\]\{", text)}


@pytest.mark.slow  # a minute of the TPU compiler
def test_no_parameter_is_gathered_outside_its_layer(compiled):
    """No collective brings more than one layer's matrix, or the head, over `fsdp`."""
    text, _, _ = compiled
    moved = re.findall(r"= (\(?\S.*?) (?:all-gather|collective-permute)(?:-start)?\(", text)
    sizes = [math.prod(dims) for kind in moved for _, dims in hlo.shapes(kind)]
    assert len(sizes) > 10
    largest = max(F * D, MICRO * WIDTH * D, V * D) // TENSOR
    assert max(sizes) <= max(largest, MICRO * WIDTH * D)
    stacked = [dims for kind in moved for _, dims in hlo.shapes(kind) if dims[:1] == (LAYERS,)]
    assert stacked == []


@pytest.mark.slow  # a minute of the TPU compiler
def test_nothing_of_the_size_of_the_logits_exists(compiled):
    """Of the vocabulary, or of a chip's part, there are weights [V, D] and chunks of few tokens."""
    text, _, _ = compiled
    wide = [dims for dims in arrays(text) if V in dims or V // TENSOR in dims]
    assert wide
    for dims in wide:
        rest = math.prod(dims) // (V if V in dims else V // TENSOR)
        assert rest in (D, D // FSDP, D * LAYERS) or rest <= MICRO * WIDTH // 16, dims


@pytest.mark.slow  # a minute of the TPU compiler
def test_the_optimizer_lies_on_all_chips(compiled):
    state = compiled[2]
    held, whole = plan.shard_bytes(state.opt_state), 0
    for leaf in jax.tree.leaves(state.opt_state):
        whole += leaf.size * leaf.dtype.itemsize
    assert held <= 1.01 * whole / (FSDP * TENSOR)


@pytest.mark.slow  # a minute of the TPU compiler
def test_collectives_are_within_a_third_of_the_ideal(compiled):
    """Bytes that a chip sends in a step of 4 micro-batches; both axes, and their sum."""
    micro_batches, weights = 4, LAYERS * (2 * D * HEADS * HD + 2 * D * KV * HD + 3 * D * F) + V * D
    part = 2 * weights / TENSOR * (FSDP - 1) / FSDP  # bfloat16
    fsdp = micro_batches * (3 * part + part)
    rows = 2 * MICRO * WIDTH * D * 2 * (TENSOR - 1) / TENSOR  # an all-reduce of the hidden states
    tensor = micro_batches * LAYERS * 5 * rows
    found = {axis: 0.0 for axis in ("fsdp", "tensor")}
    for one in compiled[1].collectives:
        found[one.axes if one.axes in found else "fsdp"] += one.bytes
    assert 0.5 * fsdp < found["fsdp"] <= 1.3 * fsdp, found
    assert 0.5 * tensor < found["tensor"] <= 1.3 * tensor, found
    assert sum(found.values()) <= 1.3 * (fsdp + tensor)


@pytest.mark.nightly  # two compilations
def test_weak_scaling_by_the_estimate():
    """From 16 to 256 chips at 8,192 tokens a chip the estimated time grows by a tenth at most."""
    pytest.importorskip("libtpu", reason="needs jax[tpu]: its compiler runs without a TPU")
    seconds = []
    for topology, fsdp in (("v5p:2x2x4", 16), ("v5p:4x8x8", 256)):
        made = plan.make_plan(qwen3_8b(fsdp, 1, 4 * fsdp), topology, ("train",))
        assert made.fits
        seconds.append(max(made.programs[0].seconds.values()))
    assert seconds[1] <= 1.1 * seconds[0], seconds


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_load_and_say_how_they_are_planned(name):
    path = FOLDER / f"{name}.yaml"
    config = configs.load(path)
    assert configs.validate(config) == []
    assert f"grpo-jax plan  configs/{name}.yaml --topology {RECIPES[name]}" in path.read_text()
    assert yaml.safe_load(path.read_text()).keys() <= configs.to_dict(config).keys()


@pytest.mark.nightly  # minutes of compilation each
@pytest.mark.parametrize("name", RECIPES)
def test_recipes_fit_with_a_tenth_to_spare(name):
    topology = RECIPES[name]
    needed = "jax_cuda13_plugin" if topology.startswith("h") else "libtpu"
    pytest.importorskip(needed, reason=f"needs the compiler of {topology}")
    made = plan.make_plan(configs.load(FOLDER / f"{name}.yaml"), topology)
    assert made.fits and made.peak <= 0.9 * made.memory

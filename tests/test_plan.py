"""Plans against what the same programs are when they run, on devices of this machine."""

import dataclasses
import importlib.util
import json
import os

import jax
import numpy as np
import pytest

from grpo_jax import cli, plan, plan_report
from grpo_jax import config as configs
from grpo_jax.models import transformer
from grpo_jax.scale import chips
from grpo_jax.scale import mesh as meshes
from grpo_jax.scale.mesh import AXES
from grpo_jax.train import optimizer, state

CONFIG = configs.from_dict(
    {
        "model": {"path": "tiny", "remat": "full"},
        "data": {"max_prompt_tokens": 32},
        "sampling": {"max_new_tokens": 32},
        "rollout": {
            "prompts_per_step": 4,
            "completions_per_prompt": 4,
            "micro_batch_size": 1,
            "head_chunk": 16,
        },
        "mesh": {"fsdp": 2, "tensor": 2},
    }
)


@pytest.fixture(scope="module")
def found() -> plan.Plan:
    return plan.make_plan(CONFIG, "cpu:4")


def program(found: plan.Plan, name: str) -> plan.ProgramReport:
    return next(p for p in found.programs if p.name == name)


def test_the_shape_of_the_work(found):
    assert found.chips == 4 and found.mesh == {
        "data": 1,
        "fsdp": 2,
        "expert": 1,
        "context": 1,
        "tensor": 2,
    }
    assert (found.rows, found.width, found.micro_rows, found.micro_batches) == (16, 64, 1, 8)


def test_memory_is_that_of_the_state_when_it_exists(found):
    """Bytes on one device of a state that is really made; and the compiler's arguments agree."""
    mesh = jax.make_mesh(
        (1, 2, 1, 1, 2), AXES, (jax.sharding.AxisType.Auto,) * 5,
        devices=jax.devices()[:4],
    )  # fmt: skip
    model = plan.abstract_model(CONFIG, mesh)
    opt = optimizer.build_optimizer(CONFIG.optimizer, 100)
    made, _ = state.born_sharded(
        lambda: transformer.init_params(model.loaded.config, jax.random.key(0)),
        transform=opt.transform,
        mesh=mesh,
    )
    first = mesh.devices.flat[0]

    def held(tree) -> int:
        return sum(
            shard.data.nbytes
            for x in jax.tree.leaves(tree)
            for shard in x.addressable_shards
            if shard.device == first
        )

    assert found.parts["parameters"] == held(made.params)
    assert found.parts["optimizer"] == held(made.opt_state)
    assert found.parts["reference"] == held(made.params)  # a KL penalty is on by default
    batch = 16 * 64 / 2 * (3 * 4 + 1 + 5 * 4)  # ids, mask, floats: half of the rows each
    train = held(made) + batch + 3 * 4
    assert program(found, "train").arguments == pytest.approx(train, abs=64)
    assert found.needs(program(found, "train")) == pytest.approx(
        program(found, "train").arguments
        + found.parts["reference"]
        + program(found, "train").results
        + program(found, "train").temporaries
    )


def test_products_are_those_on_paper(found):
    """2 · weights · tokens forward, plus attention over all pairs and the head on what is trained.

    The train step has a forward pass, its repetition (remat, chunked head) and two products for
    each; of a layer's repetition the last product is not needed again.
    """
    shape = plan.abstract_model(CONFIG, one_device()).loaded.config
    tokens = found.rows * found.width
    d, f, heads, kv, hd = 64, 160, 4, 2, 16
    layer = 2 * tokens * (d * heads * hd * 2 + d * kv * hd * 2 + 3 * d * f)
    attention = 2 * 2 * tokens * found.width * heads * hd
    trained = found.rows * 32
    head = 2 * trained * d * shape.vocab_size
    score, train = program(found, "score"), program(found, "train")
    angles = 2 * tokens * hd / 2  # of RoPE, once a forward pass
    assert score.flops == shape.num_layers * (layer + attention) + head + angles
    last = 2 * tokens * d * f
    scores = attention / 2  # attention keeps no weights: once more for its own gradient
    layers = shape.num_layers * (4 * (layer + attention) - last + scores)
    assert train.flops == layers + 4 * head + angles
    assert found.model_flops == 3 * score.flops


def one_device():
    return jax.make_mesh((1, 1, 1, 1, 1), AXES, devices=jax.devices()[:1])


@pytest.mark.parametrize("name", ["train", "score", "prefill", "decode"])
def test_the_compiled_program_has_the_products_of_the_traced_one(found, name):
    """A twentieth of room: the partitioner repeats small products, or folds some away."""
    one = program(found, name)
    assert one.flops_compiled == pytest.approx(one.flops / found.chips, rel=0.05)


def test_parameters_are_gathered_over_fsdp_and_activations_reduced_over_tensor(found):
    kinds = {(c["kind"], c["axes"]) for c in program(found, "train").collectives}
    assert ("all-gather", "fsdp") in kinds and ("all-reduce", "tensor") in kinds


def test_the_cache_is_among_the_arguments_of_a_decode_step(found):
    """2 layers, keys and values, 16 completions over 2 shards, 1 of 2 heads, 64 + 32 positions."""
    shape = plan.abstract_model(CONFIG, one_device()).loaded.config
    slots = 2 * 2 * 8 * 1 * (64 + 32) * 16 * 4
    weights = sum(x.size for x in jax.tree.leaves(transformer.abstract_params(shape)))
    decode = program(found, "decode")
    assert slots + weights <= decode.arguments <= slots + 4 * weights
    assert decode.results < 0.2 * slots + 16 * shape.vocab_size * 4  # the cache is written in place


def test_estimates_follow_the_table(found):
    """Each resource's time is its work over its peak, and the larger one binds."""
    chip = chips.CHIPS["v5e"]
    sent = {"kind": "all-gather", "axes": "fsdp", "times": 1, "bytes": 5e9}
    from grpo_jax.scale import hlo

    work = hlo.Program(1e12, 8.19e11, [hlo.Collective(**sent)], 0)
    seconds = plan._roofline(1.97e14 / 2, work, chip)
    assert seconds == pytest.approx({"compute": 0.5, "memory": 1.0, "links": 0.05})
    assert dataclasses.replace(found.programs[0], seconds=seconds).bound == "memory"


def test_without_peak_numbers_nothing_is_estimated(found):
    assert found.fits is None and found.mfu is None
    text = "\n".join(plan_report.lines(found))
    assert "ESTIMATE of" not in text and "MFU" not in text and "at least" not in text


def test_what_does_not_fit_says_so(found):
    small = dataclasses.replace(found, memory=found.peak * 1.05)  # less than the spare tenth
    assert small.fits is False and "DOES NOT FIT" in "\n".join(plan_report.lines(small))
    large = dataclasses.replace(found, memory=found.peak * 1.2)
    assert large.fits is True and "fits: 83%" in "\n".join(plan_report.lines(large))
    refused = dataclasses.replace(found.programs[0], problem="Used 20.1G of 15.75G hbm.")
    broken = dataclasses.replace(large, programs=[refused])
    assert broken.fits is False and "does not compile: Used 20.1G" in "\n".join(
        plan_report.lines(broken)
    )
    assert json.loads(plan_report.to_json(broken))["peak"] is None


def test_the_compilers_refusal_is_recognised():
    error = RuntimeError(
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. "
        "Used 20.15G of 15.75G hbm. Exceeded\n…"
    )
    assert plan._out_of_memory(error) == "Used 20.15G of 15.75G hbm. Exceeded"
    assert plan._out_of_memory(RuntimeError("something else")) is None


def test_the_json_holds_what_the_page_says(found):
    read = json.loads(plan_report.to_json(found))
    assert read["chips"] == 4 and read["fits"] is None
    assert [p["name"] for p in read["programs"]] == ["train", "score", "prefill", "decode"]
    assert read["programs"][0]["needs"] == found.needs(found.programs[0])
    assert np.isclose(read["peak"], found.peak)


def figures(value, path=""):
    """Every number, truth value and name of a JSON value, by the path that leads to it."""
    if isinstance(value, dict):
        for name, inside in value.items():
            yield from figures(inside, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for inside in value:
            yield from figures(inside, f"{path}[]")
    elif value is not None:
        yield path


def test_the_json_says_of_every_figure_where_it_comes_from(found):
    """And of the origins which are facts of the compiler, and which are estimates."""
    timed = {"compute": 1.0, "memory": 2.0, "links": 0.5}
    programs = [dataclasses.replace(p, seconds=timed, fits=True) for p in found.programs]
    full = dataclasses.replace(
        found, programs=programs, memory=1e9, mfu=0.5, step_seconds=1.0, source="a page"
    )
    refused = dataclasses.replace(full, programs=[dataclasses.replace(programs[0], problem="big")])
    there, origins = set(), {}
    for made in (full, refused):
        read = json.loads(plan_report.to_json(made))
        origins = read.pop("origins")
        there |= set(figures(read))

    def stands_for(known, path):
        return path == known or path.startswith((f"{known}.", f"{known}["))

    assert set(origins.values()) <= set(plan_report.ORIGIN_MEANS)
    assert {p for p in there if sum(stands_for(known, p) for known in origins) != 1} == set()
    assert {k for k in origins if not any(stands_for(k, p) for p in there)} == set()
    by = {
        o: {k for k, v in origins.items() if v == o} for o in ("compiler", "compiled", "estimate")
    }
    sizes = ("arguments", "results", "temporaries", "problem")
    assert by["compiler"] == {f"programs[].{k}" for k in sizes}
    assert by["compiled"] == {"programs[].flops_compiled", "programs[].collectives"}
    assert by["estimate"] == {
        "inside.activations",
        "programs[].traffic",
        "programs[].seconds",
        "programs[].bound",
        "mfu",
        "step_seconds",
    }


def test_the_page_says_traffic_and_every_kind_of_collective_by_axis(found):
    train = program(found, "train")
    text = "\n".join(plan_report.lines(found))
    assert f"{train.traffic / 1e9:.3f} GB between a chip and its memory (ESTIMATE)" in text
    sent = sum(c["bytes"] for c in train.collectives)
    assert sent > 0 and f"{sent / 1e9:.3f} GB sent to other chips (compiled program)" in text
    for one in train.collectives:
        assert f"{one['kind']} over {one['axes']}: {one['times']} times" in text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5e", "is not CHIP:SHAPE"),
        (
            "b300:8",
            "no peak numbers of a chip 'b300' are known; there are v5e, v5p, h100, h200, v6e",
        ),
        ("h200:2x2", "GPUs of one machine have a number, as in h200x8"),
        ("h200x8*2", "several machines cannot be planned yet"),
        ("cpu:99", "needs 99 CPU devices and there are 8; set JAX_NUM_CPU_DEVICES=99"),
    ],
)
def test_unknown_topologies_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        chips.topology(name)


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is not None or "TPU_LIBRARY_PATH" in os.environ,
    reason="the TPU compiler is here",
)
def test_without_the_tpu_compiler_the_extra_is_named():
    with pytest.raises(
        ValueError, match=r"the TPU compiler is not here .* pip install 'jax\[tpu\]'"
    ):
        chips.topology("v5e:2x2")


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is not None, reason="the CUDA compiler is here"
)
def test_without_the_cuda_compiler_the_extra_is_named():
    with pytest.raises(ValueError, match=r"the CUDA compiler is not here.*'jax\[cuda13\]'"):
        chips.topology("h200x8")


def test_what_stands_out_inside_programs(found):
    """Gradients lie as parameters do; two layers keep their input; the cache is counted by hand."""
    assert found.inside["gradients"] == found.parts["parameters"]
    assert found.inside["cache"] == 2 * 2 * 8 * 1 * (64 + 32) * 16 * 4
    row, angles = 64 * 64 * 4, 2 * 64 * 8 * 4  # of 1 row of 64 tokens, width 64
    # Layers: 2 inputs. After them: the last output, the norm's two products and its scale; 2 norms
    # of a token; and of the embedding, which token each was.
    last = 3 * row + 2 * 64 * 4 + 64 * 4
    assert found.inside["activations"] == 2 * row + angles + last


def test_a_whole_step_adds_up_its_calls(found):
    """Two epochs of one update, two score passes, and two waves of 32 tokens."""
    times = {"train": 1.0, "score": 0.1, "prefill": 0.01, "decode": 0.001}
    programs = {
        p.name: dataclasses.replace(p, seconds={"compute": times[p.name], "memory": 1e-6})
        for p in found.programs
    }
    twice = dataclasses.replace(CONFIG, rollout=dataclasses.replace(CONFIG.rollout, epochs=2))
    seconds = plan._step_seconds(twice, programs, passes=2, waves=2)
    assert seconds == pytest.approx(2 * 1.0 + 2 * 0.1 + 2 * (0.01 + 32 * 0.001))
    timed = dataclasses.replace(found, step_seconds=1.5, memory=found.peak * 2, source="here")
    assert "sampling, scoring and updates: 1.50 s at least" in "\n".join(plan_report.lines(timed))


def test_suggestions_are_compiled(found):
    """Where all fits: more rows at a time, less recomputed, less split. Each needs what it says."""
    made = {c.change: c.plan for c in plan_report.suggestions(CONFIG, "cpu:4", found)}
    more = made["--rollout.micro-batch-size 2"]
    kept = made["--model.remat dots_with_no_batch_dims_saveable"]
    assert made.keys() == {
        "--rollout.micro-batch-size 2",
        "--model.remat dots_with_no_batch_dims_saveable",
        "--mesh.fsdp 4 --mesh.tensor 1",
    }
    before = found.programs[0]
    assert more.micro_rows == 2 and more.programs[0].temporaries > before.temporaries
    assert kept.inside["activations"] > found.inside["activations"]
    assert kept.programs[0].flops < before.flops
    text = "\n".join(
        plan_report.suggestion_lines(plan_report.suggestions(CONFIG, "cpu:4", found), found)
    )
    assert f"{more.needs(more.programs[0]) / 2**30:.2f} GiB" in text


def test_what_does_not_fit_gets_changes_that_need_less(found, monkeypatch):
    tried = []

    def refuse(config, topology, programs):
        assert programs == ("train",)
        tried.append((config.rollout.micro_batch_size, config.model.remat, config.mesh.tensor))
        raise configs.ConfigError("does not divide")

    monkeypatch.setattr(plan, "make_plan", refuse)
    large = dataclasses.replace(found, memory=1.0, micro_rows=4)
    light = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, remat="none"))
    made = plan_report.suggestions(light, "cpu:4", large)
    assert tried == [
        (2, "none", 2),
        (1, "dots_with_no_batch_dims_saveable", 2),
        (1, "none", 4),
    ]
    assert all("does not divide" in c.problem for c in made)
    assert "does not divide" in "\n".join(plan_report.suggestion_lines(made, large))


def test_an_unknown_model_names_those_that_are_known():
    wrong = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, path="nowhere"))
    with pytest.raises(configs.ConfigError, match="is no folder, and no known model; known are"):
        plan.make_plan(wrong, "cpu:4")


def test_rows_that_do_not_divide_are_refused_before_anything_is_compiled():
    wrong = dataclasses.replace(CONFIG, mesh=dataclasses.replace(CONFIG.mesh, fsdp=8, tensor=1))
    wrong = dataclasses.replace(
        wrong, rollout=dataclasses.replace(wrong.rollout, micro_batch_size=4)
    )
    with pytest.raises(configs.ConfigError, match="use a multiple of 32"):
        plan.make_plan(wrong, "cpu:8")


@pytest.mark.parametrize("estimator", ["gae", "opd"])
def test_a_second_model_is_refused_not_forgotten(estimator):
    """A critic or a teacher takes memory that a plan does not count."""
    chosen = dataclasses.replace(
        CONFIG, advantage=dataclasses.replace(CONFIG.advantage, estimator=estimator)
    )
    with pytest.raises(configs.ConfigError, match=f"'{estimator}' keeps a second model"):
        plan.make_plan(chosen, "cpu:8")


def test_a_search_tries_every_tensor_size(monkeypatch):
    def refuse(config, topology):
        raise configs.ConfigError("not compiled here")

    monkeypatch.setattr(plan, "make_plan", refuse)
    rows = dataclasses.replace(
        CONFIG.rollout, prompts_per_step=8, completions_per_prompt=8, updates_per_rollout=1
    )
    found = plan_report.search(
        dataclasses.replace(CONFIG, rollout=rows, mesh=meshes.MeshConfig(data=1)), "cpu:8"
    )
    assert {c.mesh["tensor"] for c in found} == {1, 2, 4, 8}
    split = dataclasses.replace(
        CONFIG, mesh=dataclasses.replace(meshes.MeshConfig(data=1), context=2)
    )
    with pytest.raises(configs.ConfigError, match="the search tries fsdp and tensor alone"):
        plan_report.search(split, "cpu:8")


def test_a_search_ranks_what_it_compiled(monkeypatch, found, capsys):
    """Stand-ins for the compiled plans: the order is what is tested."""
    times = {1: 3.0, 2: 1.0, 4: 2.0}

    def quick(config, topology):
        if config.mesh.tensor == 4:
            raise configs.ConfigError("heads do not divide")
        timed = dataclasses.replace(
            found.programs[0], seconds={"compute": times[config.mesh.tensor]}
        )
        small = config.mesh.tensor == 2 and config.rollout.micro_batch_size == 4
        return dataclasses.replace(found, programs=[timed], memory=found.peak * (1 if small else 2))

    monkeypatch.setattr(plan, "make_plan", quick)
    ranked = plan_report.search(CONFIG, "cpu:4")
    assert [(c.mesh["tensor"], c.plan is not None) for c in ranked][0] == (2, True)
    assert ranked[-1].problem == "heads do not divide"
    assert plan_report.main(CONFIG, "cpu:4", None, True) == 0
    assert "heads do not divide" in capsys.readouterr().out


def test_the_command(tmp_path, capsys, monkeypatch, found):
    monkeypatch.setattr(plan, "make_plan", lambda config, topology: found)
    path, out = tmp_path / "config.yaml", tmp_path / "plan.json"
    path.write_text(configs.dump(CONFIG))
    assert cli.main(["plan", str(path), "--topology", "cpu:4", "--out", str(out)]) == 0
    assert "4 chips as fsdp 2 × tensor 2" in capsys.readouterr().out
    assert json.loads(out.read_text())["topology"] == "cpu:4"

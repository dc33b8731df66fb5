"""Sharding rules: the first match decides, and what cannot be done is said or refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from grpo_jax.core.batch import Batch
from grpo_jax.scale import rules
from grpo_jax.scale.mesh import MeshConfig, ShardingRule, make_mesh


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def quiet(text):
    raise AssertionError(f"nothing should be said here, but: {text}")


def specs(tree, mesh, table, say=quiet):
    return jax.tree.map(lambda s: s.spec, rules.partition(tree, mesh, table, say=say))


def test_the_first_rule_that_matches_decides(mesh):
    table = [("up/weight", ("tensor", "fsdp")), ("weight", ("fsdp", None)), ("", None)]
    tree = {"up": {"weight": shape(4, 6)}, "down": {"weight": shape(4, 6)}, "scale": shape(4)}
    assert specs(tree, mesh, table) == {
        "up": {"weight": P("tensor", "fsdp")},
        "down": {"weight": P("fsdp", None)},
        "scale": P(None),
    }


def test_a_rule_speaks_of_the_last_dimensions(mesh):
    table = [("w", ("tensor", "fsdp"))]
    assert specs({"w": shape(5, 4, 6)}, mesh, table) == {"w": P(None, "tensor", "fsdp")}


def test_one_dimension_may_lie_on_two_axes(mesh):
    table = [("w", (("data", "fsdp"), None))]
    assert specs({"w": shape(8, 3)}, mesh, table) == {"w": P(("data", "fsdp"), None)}


def test_tokens_that_do_not_divide_over_context_are_refused():
    mesh = make_mesh(MeshConfig(fsdp=2, context=4))
    rules.check_width(64, mesh)
    with pytest.raises(ValueError, match=r"rows of 6 tokens do not divide over mesh.context = 4"):
        rules.place({"x": np.zeros((2, 6))}, mesh)


def test_an_unknown_axis_is_refused(mesh):
    with pytest.raises(
        ValueError,
        match=r"rule 'w' for w \[4, 4\]: unknown mesh axis 'model'; the mesh has data, fsdp",
    ):
        rules.partition({"w": shape(4, 4)}, mesh, [("w", ("model", None))])


@pytest.mark.parametrize("spec", [("fsdp", "fsdp"), (("data", "fsdp"), "fsdp")])
def test_two_dimensions_on_one_axis_are_refused(mesh, spec):
    with pytest.raises(ValueError, match=r"rule 'w' for w \[4, 4\]: mesh axis 'fsdp' stands twice"):
        rules.partition({"w": shape(4, 4)}, mesh, [("w", spec)])


def test_a_rule_longer_than_the_parameter_is_refused(mesh):
    with pytest.raises(
        ValueError, match=r"rule 'b' for b \[4\]: 2 axes .* for 1 dimensions; shorten"
    ):
        rules.partition({"b": shape(4)}, mesh, [("b", ("fsdp", "tensor"))])


def test_a_dimension_that_does_not_divide_stays_whole_and_is_said_once(mesh):
    said = []
    tree = {"a": shape(7, 4), "b": shape(4, 9)}
    found = specs(tree, mesh, [("", ("tensor", "fsdp"))], said.append)
    assert found == {"a": P(None, "fsdp"), "b": P("tensor", None)}
    assert len(said) == 1
    assert "rule '' for a [7, 4], dimension 0 of 7 over tensor = 2" in said[0]
    assert "rule '' for b [4, 9], dimension 1 of 9 over fsdp = 2" in said[0]


def test_without_say_the_logger_is_told(mesh, caplog):
    rules.partition({"a": shape(7, 4)}, mesh, [("a", ("fsdp", None))])
    assert "kept whole on every device" in caplog.text


def test_what_no_rule_matches_splits_its_largest_dividing_dimension():
    eight = make_mesh(MeshConfig())
    tree = {"w": shape(16, 24, 30), "odd": shape(9, 15), "bias": shape(64), "one": shape()}
    assert specs(tree, eight, []) == {
        "w": P(None, "fsdp", None),
        "odd": P(),
        "bias": P(),
        "one": P(),
    }


def test_foreign_trees_keep_their_values(mesh):
    tree = {"kernel": np.arange(64.0, dtype=np.float32).reshape(8, 8), "list": [np.ones((4, 2))]}
    placed = jax.device_put(tree, rules.partition(tree, mesh))
    np.testing.assert_array_equal(placed["kernel"], tree["kernel"])
    assert placed["kernel"].addressable_shards[0].data.shape == (4, 8)


def test_rows_that_do_not_divide_name_the_multiple():
    eight = make_mesh(MeshConfig())
    with pytest.raises(
        ValueError,
        match=r"batch of 12 rows does not divide over 1 micro-batches × data×fsdp = 8; "
        "use a multiple of 8",
    ):
        rules.place({"x": np.zeros((12, 3), np.float32)}, eight)
    with pytest.raises(ValueError, match="use a multiple of 16"):
        rules.check_rows(8, eight, micro_batches=2)
    with pytest.raises(ValueError, match="use a multiple of 3"):
        rules.check_rows(8, None, micro_batches=3)
    with pytest.raises(ValueError, match="batch of 0 rows"):
        rules.check_rows(0, None)
    with pytest.raises(ValueError, match="micro_batches = 0 must be at least 1"):
        rules.check_rows(8, None, micro_batches=0)
    rules.check_rows(16, eight, micro_batches=2)


def test_place_splits_rows_over_data_and_fsdp(mesh):
    rows = np.arange(24).reshape(8, 3)
    batch = Batch(rows, rows, rows, rows > 0, *[rows.astype(np.float32)] * 3)
    placed = rules.place(batch, mesh)
    assert placed.tokens.sharding.spec == P(("data", "fsdp"))
    assert placed.tokens.addressable_shards[0].data.shape == (2, 3)
    assert placed.prev_logprobs is None
    np.testing.assert_array_equal(placed.tokens, rows)


def test_rules_of_a_config_come_first(mesh):
    """For our own parameters, and for a tree that is not ours."""
    own = (
        ShardingRule("embed/table", ("fsdp", "tensor")),
        ShardingRule("kernel", (None, "data+fsdp")),
        ShardingRule("up/weight", ("fsdp",), dimensions=2),
    )
    table = rules.table(MeshConfig(data=2, fsdp=2, tensor=2, rules=own))
    tree = {
        "embed": {"table": shape(8, 4)},
        "head": {"weight": shape(8, 4)},
        "Dense_0": {"kernel": shape(6, 8), "bias": shape(8)},
        "up": {"weight": shape(4, 4)},
        "layers": {"up": {"weight": shape(2, 4, 4)}},
    }
    assert specs(tree, mesh, table) == {
        "embed": {"table": P("fsdp", "tensor")},
        "head": {"weight": P("tensor", "fsdp")},
        "Dense_0": {"kernel": P(None, ("data", "fsdp")), "bias": P(None)},
        "up": {"weight": P(None, "fsdp")},
        "layers": {"up": {"weight": P(None, "tensor", "fsdp")}},
    }
    assert rules.table(MeshConfig()) == rules.LLAMA_RULES


def test_expert_is_more_fsdp_for_all_but_experts():
    four = make_mesh(MeshConfig(fsdp=2, expert=2, tensor=2))
    tree = {
        "layers": {
            "mlp": {"up": {"weight": shape(3, 4, 8, 16)}, "down": {"weight": shape(3, 4, 16, 8)}},
            "attention": {"query": {"weight": shape(3, 8, 16)}},
        },
        "own": shape(5, 16),
    }
    both = ("fsdp", "expert")
    assert specs(tree, four, rules.LLAMA_RULES) == {
        "layers": {
            "mlp": {
                "up": {"weight": P(None, "expert", "tensor", "fsdp")},
                "down": {"weight": P(None, "expert", "fsdp", "tensor")},
            },
            "attention": {"query": {"weight": P(None, "tensor", both)}},
        },
        "own": P(None, both),
    }
    with pytest.raises(ValueError, match=r"data×fsdp×expert = 4; use a multiple of 4"):
        rules.check_rows(6, four)

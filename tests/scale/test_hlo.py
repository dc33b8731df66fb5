"""The walk over compiled programs and the count of traced ones, against numbers by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from grpo_jax.models import presets, transformer
from grpo_jax.scale import flops, hlo
from grpo_jax.scale.mesh import MeshConfig, make_mesh
from grpo_jax.train import step

L, N, D = 6, 32, 64


def layers(weights, x):
    """L products [N, D] × [D, D] under a scan."""
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0].sum()


def both_counts(function, *arguments, trips=(1,)):
    """(FLOPs of the traced, of the compiled program on one device)."""
    jitted = jax.jit(function)
    traced = flops.count(jitted.trace(*arguments).jaxpr, while_trips=trips)
    text = jitted.lower(*arguments).compile().as_text()
    return traced, hlo.read(text, {"data": 1}, unknown_trips=trips).flops


SHAPES = jnp.zeros((L, D, D)), jnp.zeros((N, D))


def test_a_loop_counts_as_often_as_it_runs():
    expected = 2 * L * N * D * D
    assert both_counts(layers, *SHAPES) == (expected, expected)


def test_gradients_and_recomputation_count_too():
    """Weights alone are differentiated: a product forward, two backward; remat adds a forward."""
    product = 2 * L * N * D * D
    plain, _ = both_counts(jax.grad(layers), *SHAPES)
    again, _ = both_counts(jax.grad(jax.checkpoint(layers)), *SHAPES)
    assert (plain, again) == (3 * product, 4 * product)


def test_a_loop_without_a_constant_bound_takes_the_callers_number():
    def some(n, w, x):
        return jax.lax.fori_loop(0, n, lambda i, x: x @ w, x)

    expected = 5 * 2 * N * D * D
    assert both_counts(some, 7, SHAPES[0][0], SHAPES[1], trips=(5, 3)) == (expected, expected)


def test_loops_inside_loops_have_numbers_of_their_own():
    def twice(n, m, w, x):
        inner = lambda i, x: jax.lax.fori_loop(0, m, lambda i, x: x @ w, x)  # noqa: E731
        return jax.lax.fori_loop(0, n, inner, x)

    expected = 5 * 3 * 2 * N * D * D
    found = both_counts(twice, 7, 7, SHAPES[0][0], SHAPES[1], trips=(5, 3))
    assert found == (expected, expected)


def test_traffic_of_a_scan_reads_each_layer_once():
    """Weights once, activations a few times; never the whole stack for each layer."""
    text = jax.jit(layers).lower(*SHAPES).compile().as_text()
    moved = hlo.read(text, {"data": 1}).bytes
    weights, state = L * D * D * 4, L * N * D * 4
    assert weights + 2 * state <= moved <= 3 * weights + 8 * state


def test_traffic_of_an_update_in_place_is_the_update():
    def put(cache, x, i):
        return jax.lax.dynamic_update_slice(cache, x, (i, 0))

    cache, x = (
        jax.ShapeDtypeStruct((1000, D), jnp.float32),
        jax.ShapeDtypeStruct((1, D), jnp.float32),
    )
    text = jax.jit(put, donate_argnums=0).lower(cache, x, 3).compile().as_text()
    assert hlo.read(text, {"data": 1}).bytes <= 4 * D * 4


def test_traffic_of_a_scatter_in_a_fusion_is_what_it_writes():
    text = """\
%scattered (a: bf16[8,4,2048,128], i: s32[8,3], u: bf16[8,4,128]) -> bf16[8,4,2048,128] {
  %a = bf16[8,4,2048,128]{3,2,1,0} parameter(0)
  %i = s32[8,3]{1,0} parameter(1)
  %u = bf16[8,4,128]{2,1,0} parameter(2)
  ROOT %scatter.1 = bf16[8,4,2048,128]{3,2,1,0} scatter(%a, %i, %u), to_apply=%take
}

ENTRY %main (a: bf16[8,4,2048,128], i: s32[8,3], u: bf16[8,4,128]) -> bf16[8,4,2048,128] {
  %a = bf16[8,4,2048,128]{3,2,1,0} parameter(0)
  %i = s32[8,3]{1,0} parameter(1)
  %u = bf16[8,4,128]{2,1,0} parameter(2)
  ROOT %f = bf16[8,4,2048,128]{3,2,1,0} fusion(%a, %i, %u), kind=kLoop, calls=%scattered
}
"""
    assert hlo.read(text, {"data": 1}).bytes == 2 * 8 * 4 * 128 * 2 + 8 * 3 * 4


def test_collectives_are_named_by_axis_and_counted_in_loops():
    """Weights over fsdp are gathered in each of L layers; the sum is reduced over both axes."""
    mesh = make_mesh(MeshConfig(data=2, fsdp=4), jax.devices()[:8])
    place = functools.partial(NamedSharding, mesh)
    weights = jax.ShapeDtypeStruct(
        (L, D, D), jnp.float32, sharding=place(PartitionSpec(None, None, "fsdp"))
    )
    x = jax.ShapeDtypeStruct((N, D), jnp.float32, sharding=place(PartitionSpec(("data", "fsdp"))))
    text = jax.jit(layers).lower(weights, x).compile().as_text()
    found = {(c.kind, c.axes): c for c in hlo.read(text, dict(mesh.shape)).collectives}
    assert found["all-gather", "fsdp"].times == L
    assert found["all-gather", "fsdp"].bytes == L * D * D * 4 * 3 / 4
    assert found["all-reduce", "data+fsdp"].bytes == 2 * 4 * 7 / 8


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", "tensor"),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", "fsdp"),
        ("replica_groups=[2,4]<=[8]", "tensor"),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", "fsdp"),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", "tensor"),
        (
            "replica_groups=mesh['a'=1,'b'=4,'c'=2], device_ids=([2,4]T(1,0)) {'b'}",
            "tensor",
        ),
        ("replica_groups={}", "fsdp+tensor"),
        ("source_target_pairs={{0,4},{4,0}}", "fsdp"),
        ("nothing", "?"),
    ],
)
def test_replica_groups_in_every_spelling(text, axes):
    mesh = {"data": 1, "fsdp": 2, "tensor": 4}
    assert hlo._axes(hlo._groups(text, 8), mesh) == axes


TPU = """\
HloModule m

%all-reduce-scatter (input: bf16[128,1024]) -> bf16[128,256] {
  %input = bf16[128,1024]{1,0:T(8,128)(2,1)} parameter(0)
  %all-reduce.6 = bf16[128,1024]{1,0:T(8,128)(2,1)} all-reduce(%input), channel_id=6, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  ROOT %dynamic-slice.51 = bf16[128,256]{1,0} dynamic-slice(%all-reduce.6), dynamic_slice_sizes={128,256}
}

%start (p: bf16[1,512,256]) -> bf16[1,1024,256] {
  %p = bf16[1,512,256]{2,1,0} parameter(0)
  %all-gather.1 = bf16[1,1024,256]{2,1,0} all-gather(%p), channel_id=10, replica_groups=mesh['a'=2,'b'=4] {'a'}, dimensions={1}, backend_config={"async_collective_fusion_config":{}}
  ROOT %custom-call.4 = (bf16[1,512,256]{2,1,0}, bf16[1,1024,256]{2,1,0}) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%done (p: bf16[1,512,256]) -> bf16[1,1024,256] {
  %p = bf16[1,512,256]{2,1,0} parameter(0)
  %all-gather.2 = bf16[1,1024,256]{2,1,0} all-gather(%p), channel_id=10, replica_groups=mesh['a'=2,'b'=4] {'a'}, dimensions={1}
  ROOT %custom-call.6 = bf16[1,1024,256]{2,1,0} custom-call(%p, %all-gather.2), custom_call_target="AsyncCollectiveDone"
}

%body (t: (s32[], bf16[128,1024])) -> (s32[], bf16[128,1024]) {
  %t = (s32[], bf16[128,1024]{1,0}) parameter(0)
  %x = bf16[128,1024]{1,0} get-tuple-element(%t), index=1
  %w = bf16[1,512,256]{2,1,0} constant({...})
  %a = bf16[1,1024,256]{2,1,0} fusion(%w), kind=kCustom, calls=%start
  %b = bf16[1,1024,256]{2,1,0} fusion(%w), kind=kCustom, calls=%done
  %k = bf16[1024,256]{1,0} bitcast(%b)
  %convolution.5 = bf16[128,256]{1,0} convolution(%x, %k), dim_labels=bf_io->bf
  %r = bf16[128,256]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter
  %i = s32[] get-tuple-element(%t), index=0
  %one = s32[] constant(1)
  %j = s32[] add(%i, %one)
  %j2 = s32[] add(%j, %one)
  ROOT %out = (s32[], bf16[128,1024]{1,0}) tuple(%j2, %x)
}

%condition (t: (s32[], bf16[128,1024])) -> pred[] {
  %n = s32[]{:T(128)} constant(13)
  %t = (s32[], bf16[128,1024]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (p: (s32[], bf16[128,1024])) -> (s32[], bf16[128,1024]) {
  %x = bf16[128,1024]{1,0} parameter(0)
  %zero = s32[] constant(2)
  %p = (s32[], bf16[128,1024]{1,0}) tuple(%zero, %x)
  ROOT %while.30 = (s32[], bf16[128,1024]{1,0}) while(%p), condition=%condition, body=%body
}
"""  # noqa: E501


def test_what_the_tpu_compiler_writes():
    """A product as a convolution, a gather in two halves, a scatter in a fusion, a loop unrolled.

    The loop counts from 2 to 13 in steps of 2: 6 rounds.
    """
    found = hlo.read(TPU, {"fsdp": 2, "tensor": 4})
    assert found.flops == 6 * 2 * 128 * 1024 * 256
    assert found.unknown_loops == 0
    assert {(c.kind, c.axes, c.times, c.bytes) for c in found.collectives} == {
        ("all-gather", "fsdp", 6, 6 * 1024 * 256 * 2 / 2),
        ("reduce-scatter", "tensor", 6, 6 * 128 * 1024 * 2 * 3 / 4),
    }


@pytest.mark.parametrize("batched", [False, True])
def test_convolutions_stand_for_products(batched):
    """The spatial form of a batch: size, stride and dilation leave one meeting for each."""
    if batched:
        line = (
            "  %c = f32[8,16,32]{2,1,0} convolution(%a, %b), window={size=8 stride=7 "
            "lhs_dilate=8}, dim_labels=0bf_0io->0bf"
        )
        sizes = {"a": "f32[8,16,64]", "b": "f32[8,64,32]"}
        expected = 2 * 8 * 16 * 64 * 32
    else:
        line = "  %c = f32[16,32]{1,0} convolution(%a, %b), dim_labels=fb_io->bf"
        sizes = {"a": "f32[64,16]", "b": "f32[64,32]"}
        expected = 2 * 16 * 64 * 32
    inside = {
        name: hlo.Instruction(name, kind, "parameter", [], "0", "") for name, kind in sizes.items()
    }
    one = hlo._instruction(line)
    assert one is not None
    assert hlo.convolution_flops(one, inside) == expected


def test_a_ragged_product_runs_each_row_once():
    """Forward, and its two gradients, for 24 rows over 4 experts of [5, 7]."""
    numbers = jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))

    def product(x, w, counts):
        return jax.lax.ragged_dot_general(x, w, counts, numbers)

    x, w, counts = jnp.zeros((24, 7)), jnp.zeros((4, 5, 7)), jnp.array([6, 6, 6, 6])
    once = 2 * 24 * 5 * 7
    assert flops.count(jax.make_jaxpr(product)(x, w, counts)) == once
    both = jax.grad(lambda x, w: product(x, w, counts).sum(), (0, 1))
    assert flops.count(jax.make_jaxpr(both)(x, w)) == 3 * once


def test_along_the_expert_axis_each_device_does_its_part_of_the_rows():
    """All devices together run each of 8 × 16 tokens through its 2 experts once."""
    shape = presets.preset(
        "tiny", num_experts=4, experts_per_token=2, expert_size=8, normalize_experts=True
    )
    ids = jax.ShapeDtypeStruct((8, 16), jnp.int32)
    found = []
    for config in (MeshConfig(), MeshConfig(fsdp=2, expert=4), MeshConfig(fsdp=4, tensor=2)):
        hidden = step.rows_stay(transformer.policy_for(shape), make_mesh(config)).hidden
        traced = jax.make_jaxpr(hidden)(transformer.abstract_params(shape), ids, ids, ids)
        found.append(flops.count(traced))
    dense = 2 * 128 * (2 * 64 * 64 + 2 * 64 * 32 + 64 * 4) + 4 * 128 * 16 * 64
    mixed = (
        2 * 128 * 2 * 64
    )  # the sum over a token's experts, which every neighbour makes a part of
    assert found[0] == 2 * (dense + 2 * 128 * 2 * 3 * 64 * 8 + mixed) + 2 * 128 * 8
    assert [f - found[0] for f in found[1:]] == [2 * 3 * mixed, 2 * mixed]


def test_library_calls_are_products_too():
    """cuBLAS says what it contracts; the TPU compiler's ragged product is known by its name."""
    inside = {
        name: hlo.Instruction(name, kind, "parameter", [], "0", "")
        for name, kind in {"a": "bf16[16,64]", "b": "bf16[64,32]", "w": "bf16[4,64,32]"}.items()
    }
    lines = {
        "  %g = (bf16[16,32]{1,0}, s8[4]{0}) custom-call(%a, %b), "
        'custom_call_target="__cublas$gemm", backend_config={"dot_dimension_numbers":'
        '{"lhs_contracting_dimensions":["1"]}}': 1,
        "  %ragged-dot-none.1 = bf16[16,32]{1,0} custom-call(%a, %w), "
        'custom_call_target="tpu_custom_call"': 1 / 2,
        '  %c = bf16[16,32]{1,0} custom-call(%a), custom_call_target="AllocateBuffer"': 0,
    }
    for line, share in lines.items():
        one = hlo._instruction(line)
        assert one is not None
        assert hlo.kernel_flops(one, inside, 2) == share * 2 * 16 * 64 * 32


def test_an_asynchronous_reduce_scatter_sends_the_whole_once():
    """Its start names the whole and the part; a chip sends all but its own part of the whole."""
    text = """\
ENTRY %main (p: f32[8,16]) -> f32[2,16] {
  %p = f32[8,16]{1,0} parameter(0)
  %s = (f32[8,16]{1,0}, f32[2,16]{1,0}) reduce-scatter-start(%p), replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add
  ROOT %d = f32[2,16]{1,0} reduce-scatter-done(%s)
}
"""  # noqa: E501
    (found,) = hlo.read(text, {"fsdp": 4}).collectives
    assert (found.kind, found.axes, found.bytes) == ("reduce-scatter", "fsdp", 8 * 16 * 4 * 3 / 4)


def test_sizes_of_types():
    assert hlo.size("(bf16[6,128]{1,0:T(8,128)(2,1)}, s32[], pred[3])") == 6 * 128 * 2 + 4 + 3
    assert np.isclose(hlo.size("f8e4m3fn[8]"), 8)

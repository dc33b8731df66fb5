"""The kept set equals a stable sort's, whatever the filter, the ties and the shapes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.core import filtering
from grpo_jax.core.filtering import FilterConfig

NONE = FilterConfig()


@pytest.fixture(autouse=True)
def quick_compilation():
    """Programs that run once: compiling them well would take four times as long."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@functools.partial(jax.jit, static_argnums=1)
def kept_of(logits, config):
    return filtering.apply_filters(logits, config) > -jnp.inf


def by_sorting(logits, config):
    """The plain definition, one row at a time: rank by (larger logit, smaller id)."""
    z = np.asarray(logits, np.float64)
    z = z / config.temperature
    keep = np.isfinite(z)
    order = np.lexsort((np.arange(len(z)), -z))
    if config.uses_top_k and config.top_k < len(z):
        keep &= z >= z[order[config.top_k - 1]]
    if config.uses_top_p:
        p = np.where(keep, np.exp(z - z.max()), 0.0)[order]
        before = np.cumsum(p) - p
        survivors = order[(before < config.top_p * p.sum()) | (np.arange(len(z)) == 0)]
        keep &= np.isin(np.arange(len(z)), survivors)
    if config.min_p > 0:
        keep &= z >= z.max() + np.log(config.min_p)
    return keep


FILTERS = {
    "off": NONE,
    "k1": FilterConfig(top_k=1),
    "k5": FilterConfig(temperature=0.7, top_k=5),
    "k300": FilterConfig(top_k=300),
    "p50": FilterConfig(top_p=0.5),
    "p95": FilterConfig(temperature=1.3, top_p=0.95),
    "k5_p80": FilterConfig(top_k=5, top_p=0.8),
    "k300_p80": FilterConfig(top_k=300, top_p=0.8),
    "min_p": FilterConfig(min_p=0.1),
    "all": FilterConfig(temperature=0.9, top_k=50, top_p=0.9, min_p=0.02),
}


def rows(vocabulary):
    rng = np.random.default_rng(vocabulary)
    smooth = rng.normal(0, 2.5, (6, vocabulary))
    # Multiples of 1/4 make many exact ties; half of one row cannot be drawn at all.
    tied = np.round(4 * rng.normal(0, 1, (6, vocabulary))) / 4
    tied[0, ::2] = -np.inf
    return np.concatenate([smooth, tied])


@pytest.mark.parametrize(
    ("name", "few"), [*((name, 8) for name in FILTERS), ("p95", 1024), ("k300_p80", 1024)]
)
def test_the_kept_set_is_the_one_of_a_stable_sort(name, few, x64, monkeypatch):
    # With few = 8, small k, large k, rows covered by the largest values and others all occur.
    config = FILTERS[name]
    monkeypatch.setattr(filtering, "_FEW", few)
    monkeypatch.setattr(filtering, "_NUCLEUS", few)
    logits = rows(400)
    wanted = np.stack([by_sorting(row, config) for row in logits])

    def kept_sets(logits):
        z = filtering.scale(logits, config)
        return [filtering.kept(z, filtering.support(z, config, spread=s)) for s in (False, True)]

    found = jax.jit(kept_sets)(logits)
    if config.active:
        np.testing.assert_array_equal(found[0], wanted)
        np.testing.assert_array_equal(found[1], wanted)


@pytest.mark.parametrize("name", ["k5", "p95", "k300_p80", "all"])
def test_float32_keeps_the_same_set_where_no_token_sits_on_the_cut(name):
    logits = rows(400)[:6].astype(np.float32)
    wanted = np.stack([by_sorting(row, FILTERS[name]) for row in logits])
    np.testing.assert_array_equal(kept_of(jnp.asarray(logits), FILTERS[name]), wanted)


@pytest.mark.parametrize("top_k", [None, -1, 0, 4, 9])
@pytest.mark.parametrize("top_p", [None, 1.0, 1.5])
def test_report_a39_switches_that_mean_off_keep_every_token(top_k, top_p):
    logits = jnp.array([[2.0, 1.0, 0.0, -1.0]])
    assert np.all(kept_of(logits, FilterConfig(top_k=top_k, top_p=top_p)))


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (FilterConfig(top_k=2), [1, 1, 1, 0, 0]),  # all ties of the k-th stay
        (FilterConfig(top_p=0.5), [1, 1, 0, 0, 0]),  # the smallest ids of the tie stay
        (FilterConfig(top_k=2, top_p=0.5), [1, 1, 0, 0, 0]),
        (FilterConfig(top_p=0.0), [1, 0, 0, 0, 0]),
        (FilterConfig(top_p=-1.0), [1, 0, 0, 0, 0]),
        (FilterConfig(top_p=1e-17), [1, 0, 0, 0, 0]),
        (FilterConfig(min_p=1.0), [1, 1, 1, 0, 0]),
        (FilterConfig(top_k=1, top_p=0.0, min_p=1.0), [1, 0, 0, 0, 0]),
    ],
)
def test_ties_follow_the_documented_rule(config, wanted):
    logits = jnp.array([[1.0, 1.0, 1.0, 0.0, -1.0]])
    np.testing.assert_array_equal(kept_of(logits, config)[0], np.array(wanted, bool))


@pytest.mark.parametrize(
    ("p", "count"), [(0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.89, 3), (0.91, 4), (0.95, 4)]
)
def test_the_token_that_crosses_the_mass_is_kept(p, count):
    logits = jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]]))
    assert kept_of(logits, FilterConfig(top_p=p)).sum() == count


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("p", [0.125, 0.25, 0.5, 0.75, 0.875])
def test_mass_that_meets_the_cut_exactly_is_enough(p, order):
    # 1/2 + 1/4 + 1/8 + 1/8, so every sum is exact
    probabilities = np.array([0.5, 0.25, 0.125, 0.125])
    count = {0.125: 1, 0.25: 1, 0.5: 1, 0.75: 2, 0.875: 3}[p]
    logits = jnp.log(jnp.array([probabilities[::order]]))
    assert kept_of(logits, FilterConfig(top_p=p)).sum() == count


@pytest.mark.parametrize("top_k", [None, 5])
def test_an_all_equal_row_keeps_the_smallest_ids(top_k):
    logits = jnp.zeros((2, 600))
    keep = kept_of(logits, FilterConfig(top_k=top_k, top_p=0.25))
    # top-k keeps all ties, so both keep a quarter of the row
    np.testing.assert_array_equal(keep, np.broadcast_to(np.arange(600) < 150, (2, 600)))


@pytest.mark.parametrize("top_p", [1.0, 0.999])
@pytest.mark.parametrize("top_k", [5, 300])
def test_a_row_with_fewer_finite_logits_than_k_keeps_those(top_k, top_p):
    logits = np.full((1, 400), -np.inf, np.float32)
    logits[0, [3, 77, 399]] = [1.0, 0.5, 0.9]
    keep = kept_of(jnp.asarray(logits), FilterConfig(top_k=top_k, top_p=top_p))
    np.testing.assert_array_equal(np.flatnonzero(keep), [3, 77, 399])


@pytest.mark.parametrize("offset", [-1e4, 0.0, 1e4])
def test_a_constant_added_to_a_row_changes_nothing(offset):
    logits = rows(400)[6:].astype(np.float32)  # multiples of 1/4 stay exact at this offset
    config = FilterConfig(top_k=50, top_p=0.9)
    np.testing.assert_array_equal(kept_of(logits, config), kept_of(logits + offset, config))


@pytest.mark.parametrize("config", [NONE, FilterConfig(top_k=3), FilterConfig(top_p=0.9)])
def test_ids_beyond_the_vocabulary_are_never_kept(config):
    logits = jnp.array([[1.0, 0.0, 0.5, -1.0, 9.0, 9.0]])
    config = dataclasses.replace(config, vocabulary=4)
    keep = kept_of(logits, config)
    np.testing.assert_array_equal(keep[:, :4], kept_of(logits[:, :4], config))
    assert not np.any(keep[:, 4:])


def test_scaling_runs_in_float32_also_for_bfloat16_logits():
    logits = jnp.array([[3.0, 1.0]], jnp.bfloat16)
    out = filtering.apply_filters(logits, FilterConfig(temperature=0.7))
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, np.array([[3.0, 1.0]]) / 0.7, rtol=1e-6)


def test_top_k_never_compiles_to_a_sort_of_the_vocabulary():
    logits = jnp.zeros((4, 2048))
    for config in (
        FilterConfig(top_k=50),
        FilterConfig(top_p=0.9),
        FilterConfig(top_k=50, top_p=0.9),
    ):
        text = kept_of.lower(logits, config).compile().as_text()
        assert " sort(" not in text


def test_running_sums_find_the_first_id_beyond_the_target():
    rng = np.random.default_rng(0)
    weights = rng.integers(0, 3, (50, 700)).astype(np.float32)  # sums are exact
    target = rng.uniform(0, weights.sum(-1)).astype(np.float32)
    found = jax.jit(filtering.invert_running_sum)(weights, target)
    wanted = np.argmax(np.cumsum(weights, -1) > target[:, None], -1)
    np.testing.assert_array_equal(found, wanted)


def test_a_target_at_the_whole_sum_still_finds_a_positive_weight():
    weights = np.zeros((1, 700), np.float32)
    weights[0, [5, 300]] = 0.1
    assert filtering.invert_running_sum(jnp.asarray(weights), jnp.array([9.0]))[0] == 300


def test_argmax_takes_the_smallest_id_of_a_tie():
    z = np.zeros((2, 700), np.float32)
    z[0, [400, 650]] = 1.0
    np.testing.assert_array_equal(filtering.argmax(jnp.asarray(z)), [400, 0])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1 must be finite and not negative"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": -2}, "top_k=-2 must be positive; None, 0 and -1 turn it off"),
        ({"top_k": 1.5}, "top_k=1.5 must be a whole number"),
        ({"top_k": True}, "top_k=True must be a whole number"),
        ({"top_p": float("nan")}, "top_p=nan"),
        ({"vocabulary": 0}, "vocabulary=0 must be at least 1"),
        ({"min_p": 1.1}, "min_p=1.1 must lie between"),
        ({"min_p": float("nan")}, "min_p=nan must lie between"),
    ],
)
def test_values_out_of_range_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        FilterConfig(**values)


def test_temperature_alone_does_not_count_as_a_filter():
    assert not FilterConfig(temperature=0.5).active
    assert FilterConfig(top_k=1).active and FilterConfig(top_p=0.9).active
    assert FilterConfig(min_p=0.1).active


def test_a_run_refuses_a_top_k_beyond_the_vocabulary():
    filtering.check_vocabulary(FilterConfig(top_k=7), 7)
    filtering.check_vocabulary(FilterConfig(top_k=-1), 7)
    with pytest.raises(ValueError, match="top_k=9 is more than the vocabulary of 7 tokens"):
        filtering.check_vocabulary(FilterConfig(top_k=9), 7)
    with pytest.raises(ValueError, match="vocabulary=9 is more than the 7 tokens there are"):
        filtering.check_vocabulary(FilterConfig(vocabulary=9), 7)
    with pytest.raises(ValueError, match="top_k=6 is more than the vocabulary of 5"):
        filtering.check_vocabulary(FilterConfig(top_k=6, vocabulary=5), 7)


def test_training_refuses_greedy():
    with pytest.raises(ValueError, match="temperature=0.0 is greedy decoding"):
        filtering.check_trainable(FilterConfig(temperature=0.0))


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("config", [FilterConfig(top_p=0.9), FilterConfig(top_k=2000, top_p=0.9)])
def test_a_faulty_row_ends_the_search_and_leaves_its_neighbours_alone(config, spread):
    logits = np.random.default_rng(0).normal(size=(4, 3000)).astype(np.float32)
    clean = logits.copy()
    logits[0, 5], logits[1, 7], logits[2] = np.nan, np.inf, -np.inf
    search = jax.jit(lambda z: filtering.support(z, config, spread=spread))
    for dirty, wanted in zip(search(logits), search(clean), strict=True):
        assert dirty[3] == wanted[3]

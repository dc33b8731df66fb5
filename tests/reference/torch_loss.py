"""A torch mirror of the clipped policy-gradient loss, written from the equations.

It serves tests and timing and shares no line with `grpo_jax`: plain eager torch, gradients by
autograd, any float dtype. `B` samples, `T` tokens; column 0 of the `[B, T]` arrays is never used.

Inputs (names of the conformance data): `next_token_logprobs` [B, T-1], optionally
`curr_logprobs_unfiltered` and `policy_support_mask` [B, T-1]; `prev_logprobs`,
`generation_logprobs`, `reference_policy_logprobs`, `advantages`, `token_mask` [B, T];
`sample_mask`, `rewards` [B]; `global_valid_seqs`, `global_valid_toks` scalars; optionally
`global_positive_toks` and `entropy` [B, T].

Where sample weights are fractional, errors between sampler and trainer use a 0/1 mask inside and
the weight outside; the conformance data has whole weights only, where both readings agree.

No product overflows, by these rules, which no conformance case reaches: R is the fourth root of
the type's largest number; advantages, and log-probabilities that are factors, enter with at most
size R; a log-ratio above 20 enters exp as 20; a weight times its factor is at most R^3. What is cut
has no gradient. `GUARDS = False` leaves these rules out: timings are then of plain arithmetic.
"""

import math
from typing import Any

import torch
from torch import Tensor

DEFAULTS: dict[str, Any] = dict(
    disable_ppo_ratio=False,
    token_level_loss=True,
    sequence_level_importance_ratios=False,
    ratio_clip_min=0.2,
    ratio_clip_max=0.2,
    ratio_clip_c=None,
    reference_policy_kl_penalty=0.01,
    reference_policy_kl_type="k3",
    kl_input_clamp_value=20.0,
    kl_output_clamp_value=10.0,
    use_kl_in_reward=False,
    use_importance_sampling_correction=False,
    truncated_importance_sampling_type=None,
    truncated_importance_sampling_ratio=None,
    truncated_importance_sampling_ratio_min=None,
    use_on_policy_kl_approximation=False,
    force_on_policy_ratio=False,
    use_cispo=False,
    positive_example_nll_weight=0.0,
    seq_logprob_error_in_loss=False,
    seq_logprob_error_threshold=None,
    # beyond the torch reference, from the papers
    objective=None,
    loss_normalizer=None,
    sapo_temperature_positive=1.0,
    sapo_temperature_negative=1.05,
    token_veto_threshold=None,
    entropy_bonus=0.0,
)


def masked_mean(values, mask, dim=None, denom=None):
    """sum(values * mask) / (count + 1e-8); values must be finite where the mask is 0."""
    if dim is None:
        return (values * mask).sum() / ((mask.sum() if denom is None else denom) + 1e-8)
    return (values * mask).sum(dim) / (mask.sum(dim) + 1e-8)


def calculate_kl(x, x_ref, kind, clamp_in=None, clamp_out=None, weight=None):
    """k1 = -d, k2 = d^2 / 2, k3 = e^d - 1 - d, d = x_ref - x; weighted, then clamped."""
    d = x_ref - x
    if clamp_in is not None:
        clamped = d.clamp(-clamp_in, clamp_in)
        if weight is not None:
            weight = torch.where(d == clamped, weight, weight.detach())
        d = clamped
    else:
        d = bounded(d)
    exp = lambda: capped_exp(d, 3 * math.log(root(d)))  # noqa: E731
    k = {"k1": lambda: -d, "k2": lambda: d * d / 2, "k3": lambda: exp() - 1 - d}[kind]()
    if weight is not None:
        k = fitting(weight, k) * k
    return k if clamp_out is None else k.clamp(-clamp_out, clamp_out)


def finite_exp(x):
    """exp(x), with 0 (and gradient 0) wherever that is not finite."""
    bad = ~x.detach().exp().isfinite()
    return torch.where(bad, 0.0, torch.where(bad, 0.0, x).exp())


GUARDS = True


def root(x):
    """R of the rules above: 4.3e9 in float32."""
    return torch.finfo(x.dtype).max ** 0.25


def bounded(x):
    """Finite x cut to the limit (R), without a gradient where it is cut."""
    if not GUARDS:
        return x
    limit = root(x)
    over = (x.detach().abs() > limit) & x.isfinite()
    return torch.where(over, x.detach().clamp(-limit, limit), x)


def capped_exp(x, cap=20.0):
    """exp(min(x, cap)) for finite x, without a gradient beyond."""
    if not GUARDS:
        return x.exp()
    return torch.where((x > cap) & x.isfinite(), torch.full_like(x, cap), x).exp()


def fitting(weight, factor):
    """The weight, or the largest one such that weight * factor is at most R^3."""
    if not GUARDS:
        return weight
    most = (root(weight) ** 3 / factor.detach().abs().clamp(min=1)).to(weight.dtype)
    return torch.where(weight > most, most, weight)


class _Tokens:
    """The arrays of one micro-batch after column 0 is dropped, exclusion, and sanitising."""

    def __init__(self, data: dict[str, Tensor], cfg: dict[str, Any]):
        c = data["next_token_logprobs"]
        g = data["generation_logprobs"][:, 1:]
        p = c.detach() if cfg["force_on_policy_ratio"] else data["prev_logprobs"][:, 1:]
        token, sample = data["token_mask"][:, 1:].to(c.dtype), data["sample_mask"].to(c.dtype)
        self.kl_token, self.kl_sample = token, sample
        self.kl_generation, self.counts = g, {}
        excluded = torch.zeros_like(token, dtype=torch.bool)
        if "policy_support_mask" in data:
            valid = data["policy_support_mask"] & ~p.isneginf() & ~g.isneginf()
            excluded = ((token * sample[:, None]) != 0) & ~valid
            token = token * valid
            sample = sample * (token.sum(-1) > 0)
        if cfg["seq_logprob_error_in_loss"]:
            sample = self._reject(c.detach(), g, token, sample, cfg["seq_logprob_error_threshold"])
            excluded &= self.kl_sample[:, None] != 0  # a rejected sample counts as filtered before
        self.counts["policy_support_excluded_tokens"] = excluded.sum()
        self.token, self.sample, self.mask = token, sample, token * sample[:, None]
        keep = self.mask != 0
        clean = lambda x: torch.where(keep, x, 0.0)  # noqa: E731
        self.c, self.g, self.p = clean(c), clean(g), clean(p)
        self.adv = bounded(clean(data["advantages"][:, 1:]))

    def _reject(self, c, g, token, sample, threshold):
        """Drop samples whose mean exp|g - c| exceeds the threshold, from the actor and the KL."""
        valid = (token * sample[:, None]) != 0
        error = torch.where(valid, (g - c).abs(), 0.0).exp() * valid
        keep = error.sum(-1) / valid.sum(-1).clamp(min=1) <= threshold
        kept = sample * keep
        self.kl_sample = self.kl_sample * keep
        self.counts |= dict(
            num_masked_seqs_by_logprob_error=(sample - kept).sum(),
            seq_logprob_error_valid_tokens=(token * kept[:, None]).sum(),
            seq_logprob_error_valid_seqs=kept.sum(),
        )
        return kept


def _reduce(values, token, sample, n_tok, n_seq, cfg):
    if cfg["token_level_loss"]:
        return masked_mean(values, token * sample[:, None], denom=n_tok)
    if cfg["loss_normalizer"] is not None:
        return masked_mean((values * token).sum(-1) / cfg["loss_normalizer"], sample, denom=n_seq)
    return masked_mean(masked_mean(values, token, dim=-1), sample, denom=n_seq)


def _kl_loss(t: _Tokens, data, cfg, beta, n_tok, n_seq):
    keep = (t.kl_token * t.kl_sample[:, None]) != 0
    cu = data.get("curr_logprobs_unfiltered", data["next_token_logprobs"])
    cu = torch.where(keep, cu, 0.0)
    ref = torch.where(keep, data["reference_policy_logprobs"][:, 1:], 0.0)
    if cfg["use_on_policy_kl_approximation"]:
        weight = finite_exp(cu - torch.where(keep, t.kl_generation, 0.0))
    else:
        weight = (cu - cu.detach()).exp().nan_to_num(0.0, 0.0, 0.0)
    k = calculate_kl(
        cu,
        ref,
        cfg["reference_policy_kl_type"],
        cfg["kl_input_clamp_value"],
        cfg["kl_output_clamp_value"],
        weight,
    )
    return _reduce(beta * k, t.kl_token, t.kl_sample, n_tok, n_seq, cfg)


def _ratios(t: _Tokens, cfg):
    if cfg["force_on_policy_ratio"]:
        rho = (t.c - t.c.detach()).exp()
        return rho, rho
    if cfg["disable_ppo_ratio"]:
        return bounded(t.c), bounded(t.c)
    log_ratio = bounded(t.c - t.p)
    if cfg["objective"] == "gmpo":
        low, high = math.log(1 - cfg["ratio_clip_min"]), math.log(1 + cfg["ratio_clip_max"])
        clipped = torch.where(t.adv > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=low))
        means = [capped_exp(masked_mean(x, t.token, dim=-1))[:, None] for x in (log_ratio, clipped)]
        return means[0].expand_as(log_ratio), means[1].expand_as(log_ratio)
    if cfg["sequence_level_importance_ratios"]:
        mean = masked_mean(log_ratio, t.token, dim=-1)
        rho = capped_exp(mean)[:, None].expand_as(log_ratio)
    else:
        rho = capped_exp(log_ratio)
    if cfg["objective"] == "sapo":
        return rho, rho
    return rho, rho.clamp(1 - cfg["ratio_clip_min"], 1 + cfg["ratio_clip_max"])


def _objective(t: _Tokens, cfg, rho, rho_c):
    if cfg["objective"] == "gmpo":
        return -t.adv * rho_c
    if cfg["objective"] == "sapo":
        low, high = cfg["sapo_temperature_negative"], cfg["sapo_temperature_positive"]
        tau = torch.full_like(rho, low).where(t.adv <= 0, torch.full_like(rho, high))
        return -t.adv * 4 / tau * (tau * (rho - 1)).sigmoid()
    if cfg["use_cispo"]:
        return -t.adv * rho_c.detach() * bounded(t.c)
    o = torch.maximum(-t.adv * rho, -t.adv * rho_c)
    if cfg["ratio_clip_c"] is not None:
        o = torch.where(t.adv < 0, torch.minimum(o, -t.adv * cfg["ratio_clip_c"]), o)
    return o


def _importance_weights(t: _Tokens, cfg, n_tok, n_seq):
    """Weights [B, T-1] or [B, 1], their mean, the out-of-bounds share (None if not truncated)."""
    kind, high = (
        cfg["truncated_importance_sampling_type"],
        cfg["truncated_importance_sampling_ratio"],
    )
    low = cfg["truncated_importance_sampling_ratio_min"]
    by_sequence = cfg["sequence_level_importance_ratios"]
    diff = bounded(t.p - t.g)
    log_v = (diff * t.mask).sum(-1, keepdim=True) if by_sequence else diff
    v, oob = log_v.exp().nan_to_num(0.0, 0.0, 0.0), None
    if GUARDS:
        v = v.clamp(max=root(log_v) ** 3)
    if kind == "tis":
        outside = (v > high) | (v < (low or 0.0))
        v = v.clamp(low or 0.0, high)
        oob = masked_mean(outside.to(v.dtype), t.mask, denom=n_tok)
    elif kind == "icepop":
        inside = (v >= low) & (v <= high)
        v = torch.where(inside, v, 0.0)
        oob = masked_mean((~inside).to(v.dtype), t.mask, denom=n_tok)
    keep = torch.ones_like(t.sample, dtype=torch.bool)
    if kind in ("seq-mask-tis", "geo-rs", "product-rs"):
        clean = diff.nan_to_num(0.0, 0.0, 0.0)
        if kind == "product-rs":
            gate = (clean * t.token).sum(-1).exp().nan_to_num(0.0, 0.0, 0.0)
        else:
            gate = masked_mean(clean, t.token, dim=-1).exp()
        keep = (gate >= low) & (gate <= high)
    if cfg["token_veto_threshold"] is not None:
        broken = (diff.exp() < cfg["token_veto_threshold"]) & (t.mask != 0)
        keep = keep & ~broken.any(-1)
    if kind in ("geo-rs", "product-rs"):
        v = torch.ones_like(v)
    v = v * keep[:, None]
    if kind in ("seq-mask-tis", "geo-rs", "product-rs"):
        oob = masked_mean((~keep).to(v.dtype), t.sample, denom=n_seq)
    mean_v = (
        masked_mean(v[:, 0], t.sample, denom=n_seq)
        if by_sequence
        else masked_mean(v, t.mask, denom=n_tok)
    )
    return v, mean_v, oob


def _mismatch_metrics(t: _Tokens, cfg, n_tok):
    kind, half = cfg["reference_policy_kl_type"], torch.log(torch.tensor(0.5, dtype=t.p.dtype))
    mix = torch.logaddexp(t.p, t.g) + half
    js = 0.5 * calculate_kl(mix, t.p, "k3") + 0.5 * calculate_kl(mix, t.g, "k3")
    values = dict(
        token_mult_prob_error=(t.g - t.p).abs().exp(),
        gen_kl_error=calculate_kl(t.g, t.p, kind),
        policy_kl_error=calculate_kl(t.p, t.g, kind),
        js_divergence_error=js,
        approx_entropy=-(t.c - t.g).exp() * t.c,
    )
    return {k: masked_mean(v, t.mask, denom=n_tok) for k, v in values.items()}


def _ratio_metrics(t: _Tokens, rho, rho_c, n_tok):
    out, keep = {}, t.mask != 0
    for name, x in (("probs_ratio", rho), ("probs_ratio_clamped", rho_c)):
        out[name] = masked_mean(x, t.mask, denom=n_tok)
        out[name + "_min"] = torch.where(keep, x, float("inf")).min()
        out[name + "_max"] = torch.where(keep, x, -float("inf")).max()
    return out


def _positive_nll(t: _Tokens, data, cfg):
    if cfg["positive_example_nll_weight"] <= 0 or "rewards" not in data:
        return torch.zeros((), dtype=t.c.dtype)
    mask = t.mask * (data["rewards"] > 0)[:, None]
    count = data.get("global_positive_toks", mask.sum())
    return (
        masked_mean(-bounded(t.c), mask, denom=count)
        if count > 0
        else torch.zeros((), dtype=t.c.dtype)
    )


def clipped_pg_loss(
    data: dict[str, Tensor], config: dict[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """L = L_pg + L_kl + mu L_nll of one micro-batch, over the global counts, and every metric."""
    cfg = {**DEFAULTS, **config}
    n_tok, n_seq = data["global_valid_toks"], data["global_valid_seqs"]
    beta = 0.0 if cfg["use_kl_in_reward"] else cfg["reference_policy_kl_penalty"]
    t = _Tokens(data, cfg)
    zero = torch.zeros((), dtype=t.c.dtype)
    kl = _kl_loss(t, data, cfg, beta, n_tok, n_seq) if beta else zero
    rho, rho_c = _ratios(t, cfg)
    objective = _objective(t, cfg, rho, rho_c)
    with torch.no_grad():
        v, mean_v, oob = _importance_weights(t, cfg, n_tok, n_seq)
    if cfg["use_importance_sampling_correction"]:
        objective = fitting(v, torch.maximum(objective.abs(), t.adv.abs())) * objective
    actor = _reduce(objective, t.token, t.sample, n_tok, n_seq, cfg)
    nll = _positive_nll(t, data, cfg)
    loss = actor + kl + cfg["positive_example_nll_weight"] * nll
    if cfg["entropy_bonus"]:
        entropy = torch.where(t.mask != 0, data["entropy"][:, 1:], 0.0)
        entropy = _reduce(entropy, t.token, t.sample, n_tok, n_seq, cfg)
        loss = loss - cfg["entropy_bonus"] * entropy
    with torch.no_grad():
        metrics = dict(
            loss=loss.detach(),
            **_ratio_metrics(t, rho.detach(), rho_c.detach(), n_tok),
            kl_penalty=kl.detach() / beta if beta else zero,
            **_mismatch_metrics(t, cfg, n_tok),
            sampling_importance_ratio=mean_v,
            num_valid_samples=t.sample.sum(),
            **({} if oob is None else {"is_oob_ratio": oob}),
            positive_nll_loss=nll.detach(),
            **t.counts,
        )
    return loss, metrics


GRADIENTS = ("next_token_logprobs", "curr_logprobs_unfiltered", "entropy")


def loss_and_grad(
    inputs: dict[str, Any], config: dict[str, Any], params: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Evaluate on numpy arrays, in their float dtype: {"loss", "grads", "metrics"}."""
    data = {k: torch.as_tensor(v) for k, v in inputs.items()}
    leaves = {k: data[k].requires_grad_() for k in GRADIENTS if k in data}
    loss, metrics = clipped_pg_loss(data, {**config, **(params or {})})
    if loss.requires_grad:
        loss.backward()
    zeros = lambda x: torch.zeros_like(x) if x.grad is None else x.grad  # noqa: E731
    return dict(
        loss=float(loss.detach()),
        grads={k: zeros(x).numpy() for k, x in leaves.items()},
        metrics={k: float(v) for k, v in metrics.items()},
    )

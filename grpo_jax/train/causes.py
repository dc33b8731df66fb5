"""Guess why two trainers disagree about the same step: pure functions of host arrays.

Each function looks for the fingerprint of one mistake and returns a sentence, or None. `x` and `y`
are log-probabilities [B, T] in nats of the same tokens, `valid` bool[B, T] marks the trained ones.
The thresholds are far from what rounding, dropout or one optimizer step can do to a healthy run.
"""

import numpy as np

Array = np.ndarray
ENOUGH = 8  # tokens below which a fit says nothing


def shift(x: Array, y: Array, valid: Array, names: tuple[str, str]) -> str | None:
    """Say so when `y` one column to the left or right fits `x` far better than `y` itself."""
    both = valid & np.isfinite(x) & np.isfinite(y)
    if both.sum() < ENOUGH:
        return None
    here = np.abs(x[both] - y[both]).mean()
    for step, word in ((-1, "later"), (1, "earlier")):
        # entry t of `y` rolled by `step` is y[t - step]: -1 looks one column to the right
        usable = both & np.roll(np.isfinite(y), step, axis=1)
        usable[:, -1 if step < 0 else 0] = False
        if usable.sum() < ENOUGH:
            continue
        there = np.abs(x - np.where(usable, np.roll(y, step, axis=1), 0.0))[usable].mean()
        if here > 0.05 and there < 0.25 * here:
            return (
                f"shift by one: {names[1]} fits {names[0]} {here / max(there, 1e-12):.0f} times"
                f" better when it is read one token {word}"
                f" (mean difference {here:.3g} nats, shifted {there:.3g})"
            )
    return None


def temperature(x: Array, y: Array, valid: Array, names: tuple[str, str]) -> str | None:
    """Say so when y = a x + b with a slope that is clearly not 1."""
    both = valid & np.isfinite(x) & np.isfinite(y)
    n = int(both.sum())
    if n < ENOUGH:
        return None
    a, b = x[both].astype(np.float64), y[both].astype(np.float64)
    if min(a.std(), b.std()) < 1e-3:
        return None
    correlation = float(np.corrcoef(a, b)[0, 1])
    slope = correlation * b.std() / a.std()
    error = np.sqrt(max(1 - correlation**2, 0.0) / (n - 2)) * b.std() / a.std()
    if correlation < 0.9 or abs(slope - 1) < max(0.1, 5 * error):
        return None
    sharper, flatter = (names[1], names[0]) if slope > 1 else (names[0], names[1])
    return (
        f"temperature: {names[1]} grows {slope:.2f} times as fast as {names[0]}"
        f" (correlation {correlation:.3f}), as if {sharper} were taken at a lower temperature"
        f" than {flatter}"
    )


def support(x: Array, y: Array, valid: Array, names: tuple[str, str]) -> str | None:
    """Say so when one side renormalised over a top-k/top-p set and the other did not."""
    missing_x = int((valid & np.isneginf(x) & np.isfinite(y)).sum())
    missing_y = int((valid & np.isneginf(y) & np.isfinite(x)).sum())
    if missing_x or missing_y:
        name, count = (names[0], missing_x) if missing_x >= missing_y else (names[1], missing_y)
        return (
            f"support: {count} trained tokens are outside the top-k/top-p set of {name} only;"
            " the two filters differ, or saw different logits"
        )
    both = valid & np.isfinite(x) & np.isfinite(y)
    if both.sum() < ENOUGH:
        return None
    gap = y[both] - x[both]  # first: −∞ on both sides has no difference
    for sign, filtered, plain in ((1, names[1], names[0]), (-1, names[0], names[1])):
        one_sided = (sign * gap).min() > -1e-3 and (sign * gap).mean() > 1e-2
        if one_sided:
            return (
                f"support: {filtered} is never below {plain} (by {abs(gap).mean():.3g} nats on"
                f" average): {filtered} looks renormalised over a top-k/top-p set, {plain} does not"
            )
    return None


def mask(
    ours: Array, theirs: Array | None, valid: Array, generation: Array, prev: Array | None
) -> str | None:
    """Say so when the two sides train different tokens, or the mask covers the prompt.

    `ours` and `theirs` are gradients with respect to the log-probabilities.
    """
    if theirs is not None:
        floor = 1e-6 * max(np.abs(ours).max(initial=0), np.abs(theirs).max(initial=0))
        more = int(((np.abs(theirs) > floor) & ~valid).sum())
        fewer = int(((np.abs(ours) > floor) & (theirs == 0)).sum())
        if more or fewer:
            return (
                f"mask: they have a gradient at {more} tokens that are not trained here, and none"
                f" at {fewer} tokens that are"
            )
    if valid[:, 0].any():
        return "mask: column 0 is marked as trained, but has no predecessor"
    if prev is not None:
        silent = valid & (generation == 0) & (prev < -1e-2)
        if silent.sum() > max(2, 0.02 * valid.sum()):
            return (
                f"mask: {int(silent.sum())} trained tokens have a generation log-probability of"
                " exactly 0, which is what prompt tokens get: does the mask cover the prompt?"
            )
    return None


def denominator(
    ours: Array, theirs: Array | None, losses: tuple[float, float] | None, known: dict[str, float]
) -> str | None:
    """Say so when all gradients (or the losses) differ by one constant factor.

    `known` holds the denominator used here first, then every other count of this file by name.
    """
    used_name, used = next(iter(known.items()))
    if theirs is None:
        if losses is None or losses[0] == 0 or losses[1] == 0:
            return None
        factor, what = losses[1] / losses[0], "loss"
    else:
        live = np.abs(ours) > 1e-6 * np.abs(ours).max(initial=0)
        if live.sum() < 2:
            return None
        ratios = np.where(live, theirs / np.where(live, ours, 1.0), np.nan)
        factor, what = float(np.nanmedian(ratios)), "gradient"
        spread = np.nanmax(np.abs(ratios - factor))
        if spread > 1e-3 * abs(factor):
            return _row_factors(ratios, live)
    if not np.isfinite(factor) or factor <= 0 or abs(factor - 1) < 1e-3:
        return None
    wanted = used / factor
    match = min(known, key=lambda name: abs(known[name] - wanted))
    close = abs(known[match] - wanted) < 2e-3 * wanted
    return (
        f"denominator: their {what} is {factor:.4g} times ours everywhere, as if they divided by"
        f" {wanted:.6g}"
        + (f" = {match}" if close else "")
        + f" and not by {used:.6g} = {used_name}"
    )


def _row_factors(ratios: Array, live: Array) -> str | None:
    """A factor that is constant inside each row and differs between rows: the other reduction."""
    factors = []
    for row, use in zip(ratios, live, strict=True):
        if use.sum() >= 2:
            middle = np.median(row[use])
            if np.abs(row[use] - middle).max() > 1e-3 * abs(middle):
                return None
            factors.append(middle)
    if len(factors) < 2 or np.ptp(factors) < 1e-3 * abs(factors[0]):
        return None
    return (
        "denominator: the factor between the gradients is constant inside each row but differs"
        f" between rows ({min(factors):.3g} to {max(factors):.3g}): one side averages inside each"
        " sequence first (token_level_loss=False), the other does not"
    )

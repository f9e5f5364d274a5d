"""The part of sampling that finds what top-k and top-p keep: a threshold, by bisection.

Functions for kernels: each works on one row, with all threads of one program.
"""

from __future__ import annotations

from tetrad.kernels.triton_support import jit, tl


@jit()
def key_of(value):
    """An int32 that orders as the floats do; both zeros have one key."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit()
def value_of(key):
    """The float that has this key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit()
def weigh(value, peak, scale):
    """Probability as a share of the best token's."""
    return tl.exp((value - peak) * scale)


@jit()
def _from(logits, bound, peak, scale, NUM_TOKENS: tl.constexpr, SIZE: tl.constexpr):
    """Number and weight of the tokens whose key is at least `bound`."""
    count = tl.zeros([SIZE], tl.int32)
    weight = tl.zeros([SIZE], tl.float32)
    for start in tl.range(0, NUM_TOKENS, SIZE, num_stages=3):
        token = start + tl.arange(0, SIZE)
        value = tl.load(logits + token, mask=token < NUM_TOKENS, other=float("-inf"))
        is_above = (key_of(value) >= bound) & (token < NUM_TOKENS)
        count += is_above.to(tl.int32)
        weight += tl.where(is_above, weigh(value, peak, scale), 0.0)
    return tl.sum(count), tl.sum(weight)


@jit()
def _gather(logits, scratch, low, high, NUM_TOKENS: tl.constexpr, SIZE: tl.constexpr):
    """Put the logits with keys from `low` to below `high` side by side."""
    tl.debug_barrier()  # what was there before has been read by all threads
    position = 0
    for start in range(0, NUM_TOKENS, SIZE):
        token = start + tl.arange(0, SIZE)
        value = tl.load(logits + token, mask=token < NUM_TOKENS, other=float("-inf"))
        key = key_of(value)
        is_between = (key >= low) & (key < high) & (token < NUM_TOKENS)
        rank = tl.cumsum(is_between.to(tl.int32), 0)
        tl.store(scratch + position + rank - 1, value, mask=is_between)
        position += tl.sum(is_between.to(tl.int32))
    tl.debug_barrier()  # what is there now may be read by any thread


@jit()
def _search(
    logits,
    scratch,
    target,
    low,
    low_count,
    peak,
    scale,
    BY_WEIGHT: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    SIZE: tl.constexpr,
    FEW: tl.constexpr,
):
    """The highest key from which on there are `target` tokens, or `target` weight; at least `low`.

    Also returns number and weight of the tokens above it, and how many have it.
    """
    high = key_of(peak) + 1
    count = 0
    weight = 0.0
    if NUM_TOKENS > FEW:  # Triton 3.6 fails on a loop whose body it can prove is never entered
        while (high > low + 1) & (low_count - count > FEW):
            middle = (low & high) + ((low ^ high) >> 1)
            found, mass = _from(logits, middle, peak, scale, NUM_TOKENS, SIZE)
            is_enough = (mass if BY_WEIGHT else found) >= target
            low = tl.where(is_enough, middle, low)
            low_count = tl.where(is_enough, found, low_count)
            high = tl.where(is_enough, high, middle)
            count = tl.where(is_enough, count, found)
            weight = tl.where(is_enough, weight, mass)
    if high > low + 1:
        _gather(logits, scratch, low, high, NUM_TOKENS, SIZE)
        place = tl.arange(0, FEW)
        is_real = place < low_count - count
        value = tl.load(scratch + place, mask=is_real, other=float("-inf"))
        weights = weigh(value, peak, scale)
        count_above = count
        weight_above = weight
        while high > low + 1:
            middle = (low & high) + ((low ^ high) >> 1)
            is_above = is_real & (key_of(value) >= middle)
            found = count_above + tl.sum(is_above.to(tl.int32))
            mass = weight_above + tl.sum(tl.where(is_above, weights, 0.0))
            is_enough = (mass if BY_WEIGHT else found) >= target
            low = tl.where(is_enough, middle, low)
            low_count = tl.where(is_enough, found, low_count)
            high = tl.where(is_enough, high, middle)
            count = tl.where(is_enough, count, found)
            weight = tl.where(is_enough, weight, mass)
    return low, count, weight, low_count - count


@jit()
def nth_token(logits, key, n, NUM_TOKENS: tl.constexpr, SIZE: tl.constexpr):
    """The n-th token with this key, counted from 1."""
    before = 0
    last = NUM_TOKENS
    for start in range(0, NUM_TOKENS, SIZE):
        token = start + tl.arange(0, SIZE)
        value = tl.load(logits + token, mask=token < NUM_TOKENS, other=float("-inf"))
        is_tie = ((key_of(value) == key) & (token < NUM_TOKENS)).to(tl.int32)
        is_last = (is_tie != 0) & (before + tl.cumsum(is_tie, 0) == n)
        last = tl.minimum(last, tl.min(tl.where(is_last, token, NUM_TOKENS)))
        before += tl.sum(is_tie)
    return last


@jit()
def kept_by_both(
    logits,
    scratch,
    most,
    share,
    peak,
    scale,
    NUM_TOKENS: tl.constexpr,
    SIZE: tl.constexpr,
    FEW: tl.constexpr,
):
    """Key of the last kept token, how many tokens have that key, and how many of them are kept."""
    lowest = tl.cast(-2139095041, tl.int32)  # the key of -inf
    key = lowest
    low_count = tl.cast(NUM_TOKENS, tl.int32)
    num_equal = low_count
    ties = low_count
    kept = tl.cast(-1.0, tl.float32)
    if (most > 0) & (most < NUM_TOKENS):
        key, count, weight, num_equal = _search(
            logits, scratch, most, lowest, low_count, peak, scale, False, NUM_TOKENS, SIZE, FEW
        )
        low_count = count + num_equal
        ties = most - count
        kept = weight + ties * weigh(value_of(key), peak, scale)
    if share < 1.0:
        if kept < 0.0:
            _, kept = _from(logits, lowest, peak, scale, NUM_TOKENS, SIZE)
        target = share * kept
        found, _, weight, num_equal = _search(
            logits, scratch, target, key, low_count, peak, scale, True, NUM_TOKENS, SIZE, FEW
        )
        each = weigh(value_of(found), peak, scale)
        limit = tl.where(found == key, tl.minimum(ties, num_equal), num_equal)
        wanted = tl.where(each > 0.0, tl.ceil((target - weight) / each), limit.to(tl.float32))
        wanted = tl.minimum(wanted, limit.to(tl.float32)).to(tl.int32)
        ties = tl.maximum(wanted, 1)
        key = found
    return key, num_equal, ties

"""Random numbers by position."""

from __future__ import annotations

import numpy as np
import pytest

from tetrad.engine.philox import philox4x32, uniform
from tetrad.engine.uniforms import FEW, SEEDS_AT_ONCE, DrawnSeeds, uniforms

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((ONES, ONES, ONES, ONES), (ONES, ONES), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_the_known_answers_of_the_paper_s_library(counter, key, words):
    assert " ".join(f"{word:08x}" for word in philox4x32(counter, key)) == words


def test_a_counter_serves_four_numbers():
    words = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert [uniform(0, n) for n in range(4)] == [(word >> 8) / 2**24 for word in words]
    later = philox4x32((3, 0, 0, 0), (5, 1))
    assert uniform(5 + 2**32, 13) == (later[1] >> 8) / 2**24


def test_numbers_are_of_float32_and_below_one():
    numbers = [uniform(seed, n) for seed in range(50) for n in range(50)]
    assert all(0.0 <= u < 1.0 and (u * 2**24).is_integer() for u in numbers)
    assert len(set(numbers)) > 2490


def test_every_position_has_its_own_number():
    assert len({uniform(5, n) for n in range(1000)}) > 995
    assert uniform(2**32, 0) != uniform(0, 0)
    assert uniform(0, 2**34) != uniform(0, 0)


def test_drawn_seeds_differ_and_fit_63_bits():
    seeds = [*map(DrawnSeeds(7), range(1000))]
    assert len(set(seeds)) == 1000
    assert max(seeds) < 2**63
    assert DrawnSeeds(8)(0) != seeds[0]


@pytest.mark.parametrize("seed", [0, -1, 5 + 2**40])
def test_a_drawn_seed_is_its_counter_s_first_two_words(seed: int):
    """Whoever was drawn before: the same when served again in another order."""
    draw, key = DrawnSeeds(seed), (seed & ONES, (seed >> 32) & ONES)
    for number in (0, SEEDS_AT_ONCE - 1, SEEDS_AT_ONCE, 1, 2**33 + 5):
        high, low, _, _ = philox4x32((number & ONES, number >> 32, 0, 1), key)
        assert draw(number) == (high << 32 | low) >> 1


@pytest.mark.parametrize("count", [1, FEW, FEW + 1, 500])
def test_many_numbers_at_once_are_the_same(count: int):
    seeds = [(n * 0x9E3779B97F4A7C15) % 2**64 for n in range(count)]
    indices = [n * n * 7 + (n % 5) * 2**35 for n in range(count)]
    expected = [uniform(*pair) for pair in zip(seeds, indices, strict=True)]
    found = uniforms(np.array(seeds, np.uint64), np.array(indices))
    assert found.tolist() == expected

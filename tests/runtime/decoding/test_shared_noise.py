"""Shared noise: its definition to the bit, its distribution, and the search of a whole vocabulary."""

from __future__ import annotations

import math
from decimal import Decimal, getcontext

import numpy as np
import pytest

from edge_runtime.backends.kernels.loader import native_race
from edge_runtime.decoding.sampling import Sampler, SamplingParams
from edge_runtime.decoding.shared_noise import SharedNoise

WORD = (1 << 64) - 1
# The bits of arrival times: of seed, place and token. They must stay as they are, or seeds give other texts.
VECTORS = {
    (0, 0, 0): "0x1.07ed6f530d021p+1",
    (7, 100, 1): "0x1.32c43a99862dep+2",
    (7, 100, 262143): "0x1.c13a87c64cf23p-3",
    (2**64 + 7, 100, 1): "0x1.08fda5d1b2728p-1",
    (2**63, 2**20, 4096): "0x1.09a711c4faceep-4",
}


def output(key: int, number: int) -> int:
    mixed = (key + (number + 1) * 0x9E3779B97F4A7C15) & WORD
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & WORD
    return mixed ^ (mixed >> 31)


def defined(seed: int, place: int, token: int) -> Decimal:
    """The arrival time by the definition in the module, with a logarithm of 40 digits."""
    getcontext().prec = 40
    state = 0
    words = [seed >> shift & WORD for shift in range(0, max(seed.bit_length(), 1), 64)]
    for word in words:
        state = output(state, word)
    key = output(output(state, 0), place)

    def exponential(drawn: int) -> Decimal:
        return -((Decimal(drawn >> 12) + Decimal("0.5")) / Decimal(1 << 52)).ln()

    group, member = (token >> 15) * 512 + (token & 511), token >> 9 & 63
    drawn = output(key, 2**32 + group)
    return exponential(drawn) / 64 + (0 if drawn & 63 == member else exponential(output(key, token)))


@pytest.mark.parametrize(("seed", "place", "token"), VECTORS)
def test_arrival_times_are_as_defined_and_have_the_same_bits_everywhere(seed: int, place: int, token: int) -> None:
    value = float(SharedNoise(seed).at(place).arrivals(np.array([5, token]))[1])
    assert value.hex() == VECTORS[seed, place, token]
    assert math.isclose(value, defined(seed, place, token), rel_tol=1e-9)


def test_another_seed_place_or_token_has_another_time() -> None:
    values = [
        float(SharedNoise(seed).at(place).arrivals(np.array([token]))[0])
        for seed in (0, 1, 2**64, 2**64 + 1, 2**100)
        for place in (0, 1, 7)
        for token in (0, 1, 512, 32768)
    ]
    assert len({*values}) == len(values)


def test_arrival_times_are_exponential_and_independent() -> None:
    """Kolmogorov's statistic of a million times, and correlations of neighbours in groups, places and seeds."""
    times = np.concatenate([SharedNoise(9).at(place).arrivals(np.arange(1 << 15)) for place in range(32)])
    uniform = np.sort(-np.expm1(-times))
    steps = np.arange(len(uniform) + 1) / len(uniform)
    distance = max(np.abs(uniform - steps[:-1]).max(), np.abs(uniform - steps[1:]).max())
    assert distance * math.sqrt(len(uniform)) < 1.95  # above it in one of a thousand seeds
    rows = times.reshape(32, 64, 512)
    others = np.concatenate([SharedNoise(10).at(place).arrivals(np.arange(1 << 15)) for place in range(32)]).reshape(rows.shape)
    pairs = {
        "members of a group": (rows[:, 1:], rows[:, :-1]),
        "neighbours": (rows[:, :, 1:], rows[:, :, :-1]),
        "places": (rows[1:], rows[:-1]),
        "seeds": (rows, others),
    }
    for name, (one, other) in pairs.items():
        score = np.corrcoef(one.ravel(), other.ravel())[0, 1] * math.sqrt(one.size)
        assert abs(score) < 4, name
        below = np.mean((one < 0.01) & (other < 0.01)) / 0.00995**2
        assert 0.7 < below < 1.3, name


@pytest.mark.parametrize("vocabulary", [1, 2, 63, 511, 513, 4099, 32768, 32769, 65536, 262144])
@pytest.mark.parametrize("temperature", [1e-6, 0.7, 1.0, 50.0])
def test_the_search_of_a_whole_vocabulary_finds_the_winner_of_the_race(vocabulary: int, temperature: float) -> None:
    chance = np.random.default_rng(vocabulary)
    for place in range(4):
        logits = (chance.normal(0, chance.choice([0.01, 1.0, 6.0]), vocabulary) - chance.choice([0, 1e4])).astype(np.float32)
        logits[chance.random(vocabulary) < 0.3] = -np.inf
        logits[chance.integers(vocabulary)] = 2.0
        weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
        noise = SharedNoise(5).at(place)
        assert noise.choose_of_all(logits, temperature) == noise.choose(np.arange(vocabulary), weights)


@pytest.mark.skipif(native_race() is None, reason="no row kernels run here")
@pytest.mark.parametrize("vocabulary", [1, 2, 511, 513, 4099, 32768, 32769, 65536, 262144])
@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 0.7, 1.0, 50.0])
def test_native_code_chooses_the_same(vocabulary: int, temperature: float) -> None:
    chance = np.random.default_rng(vocabulary)
    for place in range(8):
        logits = (chance.normal(0, chance.choice([0.01, 1.0, 6.0]), vocabulary) - chance.choice([0, 1e4])).astype(np.float32)
        logits[chance.random(vocabulary) < 0.3] = -np.inf
        logits[chance.integers(vocabulary)] = 2.0
        slow, fast = (SharedNoise(6, race).at(place) for race in (None, native_race()))
        assert fast.choose_of_all(logits, temperature) == slow.choose_of_all(logits, temperature)
        tokens = np.sort(chance.choice(vocabulary, min(vocabulary, 64), replace=False))
        weights = chance.random(len(tokens)) * (chance.random(len(tokens)) < 0.8)
        weights[0] = 1e-3
        assert fast.choose(tokens, weights) == slow.choose(tokens, weights)


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.8), SamplingParams(top_k=20), SamplingParams(top_p=0.8, min_p=0.01)])
def test_chosen_tokens_have_the_distribution(params: SamplingParams) -> None:
    row = np.random.default_rng(1).normal(0, 2, 1000).astype(np.float32)
    sampler, draws = Sampler(params), 4000
    expected = sampler(row)
    chosen = [sampler.choose(row, (), SharedNoise(seed).at(place)) for seed in range(40) for place in range(draws // 40)]
    assert {*chosen} <= {*expected.tokens.tolist()}
    # Cells of about the same probability; chi-square of at most 19 degrees of freedom is above 50 in one of 7,000 seeds.
    cells = dict(zip(expected.tokens.tolist(), (np.cumsum(expected.probabilities) * 19.999).astype(int).tolist(), strict=True))
    shares = np.bincount(list(cells.values()), expected.probabilities, minlength=20) * draws
    counts = np.bincount([cells[token] for token in chosen], minlength=20)
    used = shares > 0
    assert float(((counts[used] - shares[used]) ** 2 / shares[used]).sum()) < 50

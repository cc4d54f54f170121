"""The distribution of one row, against a plain dense reading of the same rules, and the shared noise that draws from it, to the bit."""

from __future__ import annotations

import math
from decimal import Decimal, getcontext

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edge_runtime.backends.kernels.loader import native_race
from edge_runtime.decoding.sampling import Sampler, SamplingParams
from edge_runtime.decoding.shared_noise import Distribution, SharedNoise
from edge_runtime.errors import RequestError

SIZE = 12
# Distinct multiples of 1/4: a bias or a penalty can make ties.
rows = st.permutations(range(-SIZE, SIZE)).map(lambda values: np.array(values[:SIZE], dtype=np.float32) / 4)
params = st.builds(
    SamplingParams,
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, SIZE + 3),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.5, 2),
    frequency_penalty=st.floats(-1, 1),
    presence_penalty=st.floats(-1, 1),
    penalty_window=st.integers(1, 6),
    logit_bias=st.dictionaries(st.integers(1, SIZE - 1), st.floats(-5, 5) | st.just(-math.inf), max_size=3),
)
pasts = st.lists(st.integers(0, SIZE - 1), max_size=10)


def naive(logits, recent, params: SamplingParams) -> np.ndarray:
    """Every step one after the other, in llama.cpp's order. Logits stay float32, so that rounding makes the same ties as in the sampler."""
    row = logits.copy()
    for token, bias in params.logit_bias.items():
        row[token] += np.float32(bias)
    penalty = np.float32(params.repetition_penalty)
    window = recent[-params.penalty_window :]
    for token in set(window):
        value = row[token] / penalty if row[token] > 0 else row[token] * penalty
        row[token] = float(value) - window.count(token) * params.frequency_penalty - params.presence_penalty
    row = row.astype(np.float64)
    order = sorted(range(SIZE), key=lambda t: -row[t])
    order = order[: params.top_k or SIZE]
    weights = np.exp(row[order] - row.max())
    reached = np.cumsum(weights) / weights.sum() >= params.top_p
    count = int(np.flatnonzero(reached)[0]) + 1 if reached.any() else len(order)
    order = [t for t, w in zip(order[:count], weights, strict=False) if w >= params.min_p]
    out = np.zeros(SIZE)
    out[order] = np.exp((row[order] - row.max()) / params.temperature)
    return out / out.sum()


def dense(distribution: Distribution) -> np.ndarray:
    out = np.zeros(SIZE)
    out[distribution.tokens] = distribution.probabilities
    return out


@given(logits=rows, recent=pasts, params=params)
@settings(max_examples=300, deadline=None)
def test_equals_the_naive_reading(logits, recent, params):
    before = logits.copy()
    got = Sampler(params)(logits, recent)
    np.testing.assert_allclose(dense(got), naive(logits, recent, params), atol=1e-5)
    np.testing.assert_array_equal(logits, before)
    assert (got.probabilities > 0).all()
    assert (np.diff(got.tokens) > 0).all()


@given(logits=rows, recent=pasts, params=params, order=st.permutations(range(SIZE)))
@settings(max_examples=150, deadline=None)
def test_a_sparse_row_of_all_tokens_is_the_dense_row(logits, recent, params, order):
    whole, sparse = Sampler(params)(logits, recent), Sampler(params)(logits[order], recent, np.array(order))
    np.testing.assert_array_equal(whole.tokens, sparse.tokens)
    np.testing.assert_allclose(whole.probabilities, sparse.probabilities)
    noise = SharedNoise(1).at(len(recent))
    chosen = Sampler(params).choose(logits, recent, noise)
    assert chosen == Sampler(params).choose(logits[order], recent, noise, np.array(order))
    assert whole.of(chosen) > 0


@given(logits=rows, recent=pasts, params=params)
@settings(max_examples=100, deadline=None)
def test_a_sparse_row_never_gives_a_token_it_lacks(logits, recent, params):
    tokens = np.array([7, 0, 4], dtype=np.int32)
    assert set(Sampler(params)(logits[:3], recent, tokens).tokens.tolist()) <= {0, 4, 7}


def test_temperature_zero_is_the_likeliest_token_after_bias_and_penalties():
    row = np.array([1.0, 3.0, 2.0], dtype=np.float32)
    assert Sampler(SamplingParams(temperature=0))(row).tokens.tolist() == [1]
    assert Sampler(SamplingParams(temperature=0, logit_bias={1: -math.inf}))(row).tokens.tolist() == [2]
    assert Sampler(SamplingParams(temperature=0, repetition_penalty=2.0))(row, [1]).tokens.tolist() == [2]
    assert not Sampler(SamplingParams(temperature=0, top_k=3)).adjusts


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e30])
def test_extreme_temperatures_stay_finite(temperature):
    got = Sampler(SamplingParams(temperature=temperature))(np.array([-1e4, 3.0, 2.0], dtype=np.float32))
    assert got.probabilities.sum() == pytest.approx(1)
    assert got.of(1) >= got.of(2)


def nucleus_by_sorting(row: np.ndarray, share: float) -> list[int]:
    weights = np.exp(row.astype(np.float64) - row.max())
    order = np.argsort(-weights, kind="stable")
    return sorted(order[: int(np.searchsorted(np.cumsum(weights[order]), share * weights.sum())) + 1].tolist())


@pytest.mark.parametrize("scale", [0.0, 0.3, 1.0, 4.0, 300.0])
def test_a_nucleus_is_that_of_sorting_all_tokens(scale):
    random = np.random.default_rng(7)
    for size in (1, 2, 63, 5000, 50_000):
        row = np.round(random.standard_normal(size) * scale, 2).astype(np.float32)
        row[random.random(size) < 0.2] -= 500  # far below, some without any weight
        for share in (0.1, 0.9, 0.999):
            assert Sampler(SamplingParams(top_p=share))(row).tokens.tolist() == nucleus_by_sorting(row, share)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"temperature": True}, "temperature is True"),
        ({"top_k": 2.5}, "top_k is 2.5"),
        ({"top_p": -0.1}, "top_p is -0.1"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"min_p": -0.5}, "min_p is -0.5"),
        ({"min_p": 2}, "min_p is 2"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty is 1e-300"),
        ({"presence_penalty": 1e308}, r"presence_penalty is 1e\+308"),
        ({"logit_bias": {1: -1e308}}, r"logit_bias\[1\] is -1e\+308"),
        ({"frequency_penalty": math.inf}, "frequency_penalty is inf"),
        ({"presence_penalty": math.nan}, "presence_penalty is nan"),
        ({"penalty_window": 0}, "penalty_window is 0"),
        ({"logit_bias": {-1: 2.0}}, "logit_bias is -1"),
        ({"logit_bias": {"5": 2.0}}, "logit_bias is '5'"),
        ({"logit_bias": {5: math.inf}}, r"logit_bias\[5\] is inf"),
        ({"seed": -3}, "seed is -3"),
    ],
)
def test_nonsense_is_refused_with_its_value(options, words):
    with pytest.raises(RequestError, match=words):
        SamplingParams(**options)


def test_values_that_mean_none_are_those_of_llama_cpp():
    params = SamplingParams(seed=-1, top_k=-1)
    assert (params.seed, params.top_k) == (None, 0)
    assert SamplingParams(seed=0).seed == 0, "a seed like any other"
    row = np.array([0.5, -1.0, 4.0, 0.25], dtype=np.float32)
    assert Sampler(params)(row).tokens.tolist() == [0, 1, 2, 3]
    assert Sampler(SamplingParams(top_p=0, temperature=5))(row).tokens.tolist() == [2], "the likeliest alone"


@pytest.mark.parametrize("penalty", [1e6, -1e6])
def test_penalties_at_their_limits_are_taken(penalty):
    params = SamplingParams(
        frequency_penalty=penalty, presence_penalty=penalty, repetition_penalty=1 / abs(penalty), logit_bias={2: penalty}
    )
    row = np.array([1.0, 3.0, 2.0], dtype=np.float32)
    distribution = Sampler(params)(row, [1])
    assert distribution.tokens[distribution.probabilities.argmax()] == (2 if penalty > 0 else 1)
    assert SamplingParams(repetition_penalty=1e6).penalises


def test_penalties_look_back_64_tokens_by_default():
    row = np.array([1.0, 1.5, 0.0], dtype=np.float32)
    sampler = Sampler(SamplingParams(temperature=0, presence_penalty=1.0))
    assert [sampler(row, [1] + [2] * others).tokens.tolist() for others in (0, 63, 64)] == [[0], [0], [1]]


@given(st.floats(allow_nan=True), st.integers(-5, 5), st.floats(), st.floats())
@settings(deadline=None)
def test_what_passes_the_door_can_be_drawn_from(temperature, top_k, top_p, min_p):
    try:
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    except RequestError:
        assert not (temperature >= 0 and math.isfinite(temperature) and 0 <= top_p <= 1 and 0 <= min_p <= 1)
        return
    got = Sampler(params)(np.array([0.5, -1.0, 4.0, 0.25], dtype=np.float32))
    assert got.probabilities.sum() == pytest.approx(1)


@pytest.mark.parametrize("row", [[math.nan, 1.0], [-math.inf, -math.inf], [math.inf, 0.0]])
def test_rows_that_give_no_token_are_refused(row):
    with pytest.raises(RequestError, match="no token can be drawn"):
        Sampler(SamplingParams())(np.array(row, dtype=np.float32))


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=8), st.floats(0, 1, exclude_max=True))
def test_draw_follows_the_cumulative_distribution(weights, uniform):
    total, tokens = sum(weights), np.arange(len(weights)) * 3
    drawn = Distribution.proportional(tokens, np.array(weights, dtype=np.float64)).draw(uniform) // 3
    assert sum(weights[:drawn]) <= uniform * total * (1 + 1e-12)
    assert uniform * total * (1 - 1e-12) <= sum(weights[: drawn + 1])


@pytest.mark.parametrize("count", [1, 3, 7, 13, 19, 1000])
def test_the_largest_number_below_one_draws_the_last_token(count):
    even = Distribution.proportional(np.arange(count), np.full(count, 0.1))
    assert even.draw(math.nextafter(1, 0)) == count - 1  # though the probabilities of 13 sum to less than 1, of 7 to more


supports = st.lists(st.integers(0, SIZE - 1), min_size=1, unique=True).map(sorted)


def on(tokens: list[int]) -> Distribution:
    return Distribution.proportional(np.array(tokens), np.array(tokens) % 5 + 1.0)


@given(own=supports, other=supports, share=st.floats(0, 1))
@example(own=[0, 3, 7, 9], other=[3, 4], share=1.0)  # a token, or the number of tokens, looks like that of a whole vocabulary
@example(own=[0, 2, 5], other=[2, 3], share=1.0)
@example(own=[2, 5], other=[5, 9], share=1.0)
@settings(max_examples=200, deadline=None)
def test_what_is_left_of_a_distribution_is_that_of_dense_rows(own, other, share):
    left = on(own).excess(on(other), share)
    np.testing.assert_allclose(left, np.maximum(share * dense(on(own)) - dense(on(other)), 0)[own], atol=1e-15)


@pytest.mark.parametrize("k", [1, 3, 12, 40])
@pytest.mark.parametrize("size", [7, 12 * 256, 20_000])
def test_top_k_is_that_of_a_sort(size, k):
    """Of equal logits at the edge the first stay."""
    random = np.random.default_rng([size, k])
    for distinct in (2, 5, 50, 10**6):
        row = (random.integers(0, distinct, size) / distinct).astype(np.float32)
        row[random.integers(0, size, size // 200)] = -np.inf
        result = Sampler(SamplingParams(top_k=k))(row).tokens
        assert result.tolist() == sorted(np.argsort(-row, kind="stable")[:k].tolist())


def test_a_ban_is_a_text_in_json():
    written = SamplingParams(top_k=3, logit_bias={7: -math.inf, 2: 1.5}).to_json()
    assert (written["top_k"], written["logit_bias"]) == (3, {"7": "-inf", "2": 1.5})


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

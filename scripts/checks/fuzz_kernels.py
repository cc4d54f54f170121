"""Fuzzes the row kernels: random shapes, values and wrong sizes, in a build that traps undefined behaviour.

python scripts/checks/fuzz_kernels.py --inputs 20000

The library is compiled anew with clang's UndefinedBehaviorSanitizer (zig has no AddressSanitizer). Arrays end where a page begins that
cannot be touched, so that a byte read or written behind one ends the process. All variants that run here must agree bit for bit, and with
NumPy up to rounding.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.kernels.build import build, host_target
from edge_runtime.backends.kernels.draft import DraftWeights, NativeDraft
from edge_runtime.errors import BackendError
from edge_runtime.interfaces import StopNumbers
from fuzzing.guarded import filled, forget, guarded, pointer
from fuzzing.random_drafter import MATRICES, ROW_UNITS, RandomDrafters, Sizes

SANITIZERS = ("-fsanitize=undefined", "-fno-sanitize=function,vptr", "-fsanitize-trap=all")
WRONG = (0, -1, 3, -(1 << 62), (1 << 63) - 1, 1 << 31, 1 << 40)
# Types of GGUF files (enum ggml_type): inputs and bytes of a block.
_GGUF_BLOCKS = {
    **{2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34)},
    **{12: (256, 144), 13: (256, 176), 14: (256, 210)},
}
# Rows of keys and values, by number of their type: values and bytes of a block.
_CELL_BLOCKS = ((1, 2), (32, 34), (32, 18))


class Fuzzer:
    """Random calls of one library."""

    def __init__(self, library: ctypes.CDLL, seed: int) -> None:
        names = ctypes.create_string_buffer(256)
        library.edge_rows_variants(names, ctypes.c_size_t(256))
        self.variants = names.value.decode().split()
        self._library = library
        self._random = np.random.default_rng(seed)

    def products(self) -> None:
        """One matrix and one batch on all variants; sizes that no kernel takes must be refused."""
        random = self._random
        bits, block = int(random.choice([2, 4, 8])), int(random.choice([16, 32, 64, 128]))
        outputs, rows = int(random.integers(1, 150)), int(random.integers(1, 40))
        blocks = int(random.integers(1, 7 if random.random() < 0.8 else 2500 // block))
        inputs = blocks * block
        levels = filled(random.integers(0, 256, (outputs, inputs * bits // 8)).astype(np.uint8))
        scales = filled(_floats(random, (outputs, blocks)).astype(np.float16 if random.random() < 0.5 else np.float32).astype(np.float32))
        values = filled(_floats(random, (rows, inputs)))
        sizes = [outputs, inputs, bits, block, rows]
        wrong = random.random() < 0.3
        if wrong:
            sizes[int(random.integers(5))] = WRONG[int(random.integers(len(WRONG)))]
            wrong = not _fits(*sizes)
            if not wrong:
                return
        words = [
            *map(ctypes.c_int64, sizes[:2]),
            *map(ctypes.c_int, [size if abs(size) < 1 << 31 else -1 for size in sizes[2:4]]),
            *map(pointer, (levels, scales, values)),
            ctypes.c_int64(sizes[4]),
        ]
        self._agreed("multiply", words, (rows, outputs), f"a product of {sizes}", wrong=wrong)

    def static_products(self) -> None:
        """One matrix with a scale for each output, by activations of a static scale; such as are no scales included."""
        random = self._random
        bits, block = int(random.choice([2, 4, 8])), int(random.choice([16, 32, 64, 128]))
        outputs, blocks, rows = int(random.integers(1, 150)), int(random.integers(1, 40)), int(random.integers(1, 40))
        levels = filled(random.integers(0, 256, (outputs, blocks * block * bits // 8)).astype(np.uint8))
        scales = np.repeat(_floats(random, (outputs, 1)), blocks, axis=1)
        steps = filled(np.array([random.uniform(1e-3, 1), random.choice([0, 0.1])], np.float32))
        sizes, wrong = [outputs, blocks * block, bits, block, rows], int(random.integers(12))
        if wrong == 0:
            steps[int(random.integers(2))] = random.choice([np.nan, -1.0])
        elif wrong == 1:
            sizes[int(random.integers(5))] = int(random.choice((0, -1, 3, -(1 << 62), (1 << 63) - 1)))
            if _fits(*sizes):
                return
        arrays = levels, filled(scales), steps, filled(_floats(random, (rows, blocks * block)))
        words = [*map(pointer, arrays), *map(ctypes.c_int64, sizes)]
        self._agreed("multiply_static", words, (rows, outputs), f"a static product of {sizes}", wrong=wrong < 2)

    def gguf_products(self) -> None:
        """One matrix as a GGUF file has it, of random bytes; scales that are no numbers included."""
        random = self._random
        kind = int(random.choice(list(_GGUF_BLOCKS)))
        each, size = _GGUF_BLOCKS[kind]
        outputs, rows = (int(random.integers(1, most)) for most in (150, 40))
        inputs = 256 * int(random.integers(1, 4 if random.random() < 0.8 else 10))
        data = filled(random.integers(0, 256, (outputs, inputs // each * size)).astype(np.uint8))
        values = filled(_floats(random, (rows, inputs)))
        sizes = [outputs, inputs, data.shape[1], rows]
        wrong = random.random() < 0.3
        if wrong:
            place = int(random.integers(4))
            sizes[place] = WRONG[int(random.integers(len(WRONG)))]
            wrong = place in (1, 2) or not 0 < sizes[place] < 1 << 31
            if not wrong or (place == 3 and sizes[place] > 0):
                return
        words = [ctypes.c_int(kind), *map(ctypes.c_int64, sizes[:3]), pointer(data), pointer(values), ctypes.c_int64(sizes[3])]
        self._agreed("multiply_gguf", words, (rows, outputs), f"a product of type {kind} of {sizes}", wrong=wrong)

    def float_products(self) -> None:
        """One matrix of floats, of random bits; such as are no numbers included."""
        random = self._random
        kind, outputs, inputs, rows = (int(random.integers(*limits)) for limits in ((3,), (1, 70), (1, 200), (1, 40)))
        weights = filled(random.integers(0, 256, (outputs, inputs * (2 if kind else 4))).astype(np.uint8))
        values = filled(_floats(random, (rows, inputs)))
        sizes = [kind, outputs, inputs, rows]
        if wrong := random.random() < 0.2:
            sizes[int(random.integers(4))] = int(random.choice((-1, -(1 << 62), (1 << 63) - 1)))
        words = [*map(pointer, (weights, values)), *map(ctypes.c_int64, sizes)]
        self._agreed("multiply_floats", words, (rows, outputs), f"a product of floats of {sizes}", wrong=wrong)

    def attentions(self) -> None:
        """One attention on all variants, and with other numbers of queries at a time."""
        random = self._random
        fresh, heads, dim = int(random.integers(1, 14)), int(random.integers(1, 5)), int(random.integers(1, 70))
        past, origin = int(random.integers(0, 300)), int(random.integers(0, 300))
        window = int(random.integers(1, 200)) * int(random.integers(2))
        queries = filled(_floats(random, (fresh * heads, dim)))
        keys = [filled(_floats(random, (count, dim))) for count in (past, past, fresh, fresh)]
        sizes = [past, fresh, heads, dim, origin, window]
        words = [*map(pointer, (queries, *keys)), *map(ctypes.c_int64, sizes)]
        results = self._agreed("attend", words, (fresh * heads, dim), f"attention of {sizes}", batched=True)
        if not np.allclose(results, _attention(queries, keys, heads, window), rtol=1e-3, atol=1e-4):
            raise AssertionError(f"attention of {sizes} is wrong")

    def attentions_over_cells(self) -> None:
        """One attention over cells of random bytes, and again with other numbers of queries at a time."""
        random = self._random
        kind = int(random.integers(len(_CELL_BLOCKS)))
        each, size = _CELL_BLOCKS[kind]
        rows, heads, cells = int(random.integers(1, 7)), int(random.integers(1, 5)), int(random.integers(1, 200))
        dims = [int(blocks) * each for blocks in random.integers(1, 100 if each == 1 else 5, 2)]
        queries = filled(_floats(random, (rows * heads, dims[0])))
        stored = [filled(random.integers(0, 256, (cells, dim // each * size)).astype(np.uint8)) for dim in dims]
        mask = filled(np.where(random.random((rows, cells)) < random.random(), -np.inf, 0).astype(np.float16))
        sizes = [kind, cells, rows, heads, *dims]
        if wrong := random.random() < 0.2:
            sizes[int(random.integers(1, 6))] = int(random.choice((0, -1, -(1 << 62), (1 << 63) - 1)))
        words = [*map(pointer, (queries, *stored, mask)), *map(ctypes.c_int64, sizes)]
        what = f"attention over cells of {sizes}"
        self._agreed("attend_cells", words, (rows * heads, dims[1]), what, wrong=wrong, batched=True)

    def drafts(self) -> None:
        """One drafter on all variants, with wrong sizes, K/V lengths and stop rules among them."""
        random = self._random
        makes = RandomDrafters(random, filled)
        sizes = Sizes(
            hidden=32 * int(random.integers(1, 4)),
            target=32 * int(random.integers(1, 4)),
            feed=32 * int(random.integers(1, 5)),
            heads=4,
            dims=tuple(32 * int(random.integers(1, 4)) for _ in range(2)),
            kv_heads=tuple(int(random.choice([1, 2, 4])) for _ in range(2)),
            centroids=int(random.integers(0, 9)),
            top=1,
        )
        weights, sources = makes.weights(sizes, str(random.choice(MATRICES))), []
        for dim, heads in zip(sizes.dims, sizes.kv_heads, strict=True):
            kind, listed = int(random.integers(len(ROW_UNITS))), bool(random.integers(2))
            sources.append(makes.rows(kind, heads, dim, int(random.integers(1, 300)), listed=listed))
        token, hidden = int(random.integers(sizes.vocabulary)), filled(_floats(random, (sizes.target,)))
        if random.random() < 0.3:
            self._refused(weights, sizes)
        longest, results = int(random.integers(1, 13)), []
        rule = RandomRule(random, longest) if random.random() < 0.5 else None
        for number, name in enumerate(self.variants):
            draft = NativeDraft(weights, longest=12, threads=1 + number % 2, name=name, library=self._library)
            for place, rows in enumerate(sources):
                rows.describe(draft, place)
            shares: list[float] = []
            asked = rule or (lambda share, shares=shares: shares.append(share) or True)
            results.append(repr((draft.run(token, longest, hidden, None, asked), shares, rule and rule.shares)))
            self._refused_rows(draft, token, hidden)
            draft.close()
            if results[-1] != results[0]:
                raise AssertionError(f"{name} drafts {results[-1]}, {self.variants[0]} {results[0]} with {sizes}")

    def _refused(self, weights: DraftWeights, sizes: Sizes) -> None:
        """Sizes that do not fit together must be refused."""
        wrong = int(self._random.choice((0, -1, 3, -(1 << 62), (1 << 63) - 1)))
        changes: list[dict[str, Any]] = [
            {"heads": wrong},
            {"before": replace(weights.before, outputs=wrong)},
            {"after": replace(weights.after, inputs=sizes.hidden + 1)},
            {"layers": weights.layers * 33},
        ]
        change = changes[int(self._random.integers(len(changes)))]
        try:
            NativeDraft(replace(weights, **change), longest=3, library=self._library).close()
        except ValueError:
            return
        raise AssertionError(f"{change} was not refused")

    def _refused_rows(self, draft: NativeDraft, token: int, hidden: NDArray[Any]) -> None:
        """Numbers that no K/V rows have must be refused."""
        name, wrong = str(self._random.choice(["type", "kv_heads", "count", "key_turn"])), int(self._random.choice((-1, -(1 << 62))))
        setattr(draft.sources[0], name, wrong)
        try:
            draft.run(token, 1, hidden)
        except BackendError:
            return
        raise AssertionError(f"{wrong} as {name} was not refused")

    def single_values(self) -> None:
        """GELU gates, tanh and norms of some values, also such as are no numbers."""
        random = self._random
        count = int(random.integers(1, 100))
        gates, values = (filled(random.integers(0, 1 << 32, count, np.uint32).view(np.float32)) for _ in range(2))
        for function, arrays in (("gate", (gates, values)), ("tanh", (gates,)), ("norm", (gates, values, filled(values[:1])))):
            self._agreed(function, [*map(pointer, arrays), ctypes.c_int64(count)], (count,), f"{function} of {count}")

    def _agreed(
        self, function: str, words: list[Any], shape: tuple[int, ...], what: str, *, wrong: bool = False, batched: bool = False
    ) -> NDArray[np.generic]:
        """Calls a function on all variants, `batched` with two numbers of queries at a time; returns what all of them gave.

        Raises AssertionError where two differ, and where one computes what is `wrong`, or refuses what is not.
        """
        call = getattr(self._library, f"edge_rows_{function}")
        results = []
        for name in self.variants:
            for last in ([16], [int(self._random.integers(1, 17))]) if batched else ([],):
                results.append(guarded(shape, np.float32))
                if bool(call(name.encode(), *words, *map(ctypes.c_int64, last), pointer(results[-1]))) != wrong:
                    raise AssertionError(
                        f"{name}: {what} was not {'refused' if wrong else 'computed'}{f', {last} at once' if last else ''}"
                    )
                if not np.array_equal(results[-1], results[0], equal_nan=True):
                    raise AssertionError(f"{name} differs from {self.variants[0]} at {what}{f', {last} at once' if last else ''}")
        return results[0]


class RandomRule:
    """A stop rule of random numbers, such as are none included. Implements `interfaces.StopRule`."""

    def __init__(self, random: np.random.Generator, longest: int) -> None:
        bins = int(random.integers(1, 14))
        shapes = ((bins - 1,), (longest + 1,), (longest + 1,), (bins,), (bins, bins), (longest + 1, bins))
        tables = [np.where(random.random(shape) < 0.01, np.nan, random.random(shape)) for shape in shapes]
        tables[0].sort()
        self._numbers = StopNumbers(tuple(filled(table) for table in tables), float(random.random()), bool(random.integers(2)))
        self.shares: list[float] = []

    def __call__(self, probability: float) -> bool:
        raise AssertionError(f"the drafter asked about {probability} though it has the numbers")

    def numbers(self) -> StopNumbers:
        """The rule."""
        return self._numbers

    def take(self, probabilities: Sequence[float]) -> None:
        """Keeps them."""
        self.shares = list(probabilities)


def _floats(random: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    values = random.standard_normal(shape).astype(np.float32)
    values[random.random(shape) < 0.02] = 0
    return values


def _fits(outputs: int, inputs: int, bits: int, block: int, rows: int) -> bool:
    limit = 1 << 31
    sound = bits in (2, 4, 8) and block in (16, 32, 64, 128) and 0 < outputs < limit and 0 < inputs < limit
    return sound and inputs % block == 0 and rows > 0


def _attention(queries: NDArray[np.generic], keys: list[NDArray[np.generic]], heads: int, window: int) -> NDArray[np.float64]:
    all_keys, all_values = (np.concatenate([keys[part], keys[part + 2]]).astype(np.float64) for part in (0, 1))
    out = np.empty(queries.shape)
    for row, query in enumerate(queries.astype(np.float64)):
        end = len(keys[0]) + row // heads + 1
        begin = max(0, end - window) if window else 0
        scores = all_keys[begin:end] @ query
        weights = np.exp(scores - scores.max())
        out[row] = weights @ all_values[begin:end] / weights.sum()
    return out


@click.command(context_settings={"show_default": True})
@click.option("--inputs", default=20_000, help="Calls of each kind.")
@click.option("--seed", default=1)
def main(inputs: int, seed: int) -> None:
    """Fuzz the kernels of this machine's processor."""
    target = host_target()
    if target is None:
        raise click.ClickException("there are no kernels for this machine")
    with tempfile.TemporaryDirectory() as folder:
        fuzzer = Fuzzer(ctypes.CDLL(str(build(target, Path(folder), SANITIZERS))), seed)
        calls = [fuzzer.products, fuzzer.static_products, fuzzer.gguf_products, fuzzer.float_products]
        calls += [fuzzer.attentions, fuzzer.attentions_over_cells, fuzzer.single_values, fuzzer.drafts]
        for _ in range(inputs):
            for call in calls:
                call()
            forget()
    kinds = "products, of static ones, of GGUF weights, of floats, of attentions, of those over cells, of single values and of drafts"
    click.echo(f"{inputs} each of {kinds} on {', '.join(fuzzer.variants)}: no failure")


if __name__ == "__main__":
    main()

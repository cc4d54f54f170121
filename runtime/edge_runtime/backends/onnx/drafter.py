"""The MTP drafter on onnxruntime: a whole draft in one call, on the target's own K/V rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.onnx.drafting import GraphDrafter
from edge_runtime.backends.onnx.library import Call, Graph, scalar
from edge_runtime.backends.onnx.target import OrtTarget, shared_inputs
from edge_runtime.errors import BackendError
from edge_runtime.interfaces import DraftSampler, ShouldContinue

# A probability that every token has.
_ANY = float(np.finfo(np.float32).tiny)
_OUTPUTS = ("drafts", "probabilities", "hidden_out", "scores", "candidates")


class OrtDrafter(GraphDrafter[OrtTarget]):
    """A drafter whose graph is a loop over draft steps."""

    def _bind(self, graph: Graph, path: Path) -> Call:
        target, width = self._target, graph.inputs.get("hidden", (0,))[-1]
        if width != target.hidden_size:
            raise BackendError(f"{path.name} reads hidden rows of {width}, the target gives {target.hidden_size}; export the pair again")
        self._inputs = graph.inputs
        self._token, token = scalar(np.int64, 1, 1)
        self._hidden, hidden = scalar(np.float32, 1, 1, target.hidden_size)
        self._length, length = scalar(np.int64)
        self._least, least = scalar(np.float32)
        self._with_scores, with_scores = scalar(np.bool_)
        self._position, position = scalar(np.int64, 1, 1)
        inputs = {
            "token": token,
            "hidden": hidden,
            "draft_length": length,
            "least_probability": least,
            "with_scores": with_scores,
            "position_ids": position,
            **shared_inputs(target),
            **target.cache.values,
        }
        return graph.bind({name: value for name, value in inputs.items() if name in graph.inputs}, dict.fromkeys(_OUTPUTS))

    def _draft(
        self,
        call: Call,
        last: int,
        hidden: NDArray[np.float32],
        draft_length: int,
        sampler: DraftSampler | None,
        should_continue: ShouldContinue | None,
    ) -> list[int]:
        self._target.cache.set_counts(self._target.length)
        self._target.cache.place_drafter_rows(call, self._inputs, self._target.length)
        self._position[...] = self._target.length
        self._token[...], self._hidden[0, 0] = last, hidden
        if sampler is None and should_continue is None:
            return self._all_steps(call, draft_length)
        return self._single_steps(call, draft_length, sampler, should_continue)

    def _all_steps(self, call: Call, draft_length: int) -> list[int]:
        self._length[...], self._least[...], self._with_scores[...] = draft_length, self.least_probability, False
        call.run()
        drafts, probabilities = call.outputs()[:2]
        sure = len(drafts) - int(probabilities[-1] < self.least_probability)
        tokens: list[int] = drafts[:sure].tolist()
        return tokens

    def _single_steps(
        self, call: Call, draft_length: int, sampler: DraftSampler | None, should_continue: ShouldContinue | None
    ) -> list[int]:
        """One step per call: the host picks each token from the scores, or says after each whether to go on."""
        # The graph computes probabilities only where it is asked for a least one.
        self._length[...], self._least[...], self._with_scores[...] = 1, _ANY if should_continue else 0.0, sampler is not None
        tokens: list[int] = []
        while len(tokens) < draft_length:
            call.run()
            drafts, probabilities, hidden, scores, candidates = call.outputs()
            chosen = int(drafts[0]) if sampler is None else sampler(scores[0], candidates[0] if candidates.size else None)
            if chosen is None:
                break
            tokens.append(chosen)
            if should_continue is not None and not should_continue(float(probabilities[0])):
                break
            self._token[...], self._hidden[...] = chosen, hidden
        return tokens

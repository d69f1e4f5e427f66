"""Choosing the next token in numpy: greedy, or sampled after temperature, top-k and top-p, in that order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from waybill.errors import NonFiniteWeight
from waybill.text.request import SMALLEST_TEMPERATURE, Sampling

Floats = NDArray[np.floating[Any]]


class Sampler:
    """Draws tokens; holds the random generator, so that one seed governs a whole generation.

    `suppressed` tokens are never drawn, and those `at_first` not as a request's first.
    """

    def __init__(self, sampling: Sampling, suppressed: Sequence[int] = (), at_first: Sequence[int] = ()) -> None:
        self._sampling = sampling
        self._never = list(suppressed)
        self._not_now = [*suppressed, *at_first]
        if sampling.temperature > 0:
            self._random = np.random.default_rng(None if sampling.seed is None else sampling.seed % (1 << 64))

    def __call__(self, logits_BV: Floats) -> list[int]:
        """[B, V] -> B token ids.

        Raises:
            NonFiniteWeight: a row holds NaN.
        """
        if self._not_now:
            logits_BV = logits_BV.copy()
            logits_BV[:, self._not_now] = -np.inf
            self._not_now = self._never
        likeliest = logits_BV.argmax(axis=-1)
        if np.isnan(logits_BV[np.arange(len(likeliest)), likeliest]).any():  # argmax finds NaN first
            raise NonFiniteWeight(
                "the logits are not numbers",
                where="lm_head",
                expected="finite logits",
                found="NaN",
                fix="look for damaged weights with --check-finite on the checkpoint; if it is sound, export in float32",
            )
        if self._sampling.temperature == 0:
            return [int(token) for token in likeliest]
        return [self._draw(row) for row in logits_BV]

    def _draw(self, logits_V: Floats) -> int:
        tokens, probabilities = kept(logits_V, self._sampling)
        mass = probabilities.cumsum(dtype=np.float64)
        # Below the total, so that what follows the last token with any mass is never found.
        point = min(self._random.random() * mass[-1], np.nextafter(mass[-1], 0.0))
        return int(tokens[mass.searchsorted(point, side="right")])


def kept(logits_V: Floats, sampling: Sampling) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
    """The tokens that top-k and top-p leave, and the probability of each; these need not sum to 1."""
    scores = logits_V.astype(np.float32)
    # From the largest down, so that no temperature, however small, makes an infinity of it that counts.
    with np.errstate(over="ignore"):
        scores = (scores - scores.max()) / np.float32(max(sampling.temperature, SMALLEST_TEMPERATURE))
    tokens = np.arange(scores.size)
    if 0 < sampling.top_k < scores.size:
        least = np.partition(scores, -sampling.top_k)[-sampling.top_k]
        tokens = np.flatnonzero(scores >= least)
    probabilities = np.exp(scores[tokens])
    probabilities /= probabilities.sum()
    if sampling.top_p < 1:
        left = _nucleus(probabilities, sampling.top_p)
        tokens, probabilities = tokens[left], probabilities[left]
    return tokens, probabilities


def _nucleus(probabilities_K: NDArray[np.float32], top_p: float) -> NDArray[np.intp]:
    """The smallest set of places whose mass reaches top_p (arXiv 1904.09751); the likeliest is always one."""
    # Sorting a whole vocabulary takes longer than a small model's step; a few tokens often have mass enough.
    for least in (1e-3, 1e-5, 0.0):
        heavy = np.flatnonzero(probabilities_K >= least)
        if probabilities_K[heavy].sum(dtype=np.float64) >= top_p:
            break
    order = heavy[np.argsort(-probabilities_K[heavy], kind="stable")]
    ordered = probabilities_K[order]
    before = ordered.cumsum(dtype=np.float64).astype(np.float32) - ordered
    inside = before < top_p
    inside[0] = True
    return order[inside]

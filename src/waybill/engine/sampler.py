"""Choosing the next token: greedy, or sampled after temperature, top-k and top-p, in that order."""

from __future__ import annotations

import torch

from waybill.errors import NonFiniteWeight
from waybill.text.request import SMALLEST_TEMPERATURE, Sampling


class Sampler:
    """Draws tokens; holds the random generator, so that one seed governs a whole generation."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator = torch.Generator()
        if sampling.seed is not None:
            self._generator.manual_seed(sampling.seed)
        elif sampling.temperature > 0:
            self._generator.seed()

    def __call__(self, logits_BV: torch.Tensor) -> torch.Tensor:
        """[B, V] -> [B] token ids, on the CPU."""
        options = self._sampling
        if logits_BV.isnan().any():
            raise NonFiniteWeight(
                "the logits are not numbers",
                where="lm_head",
                expected="finite logits",
                found="NaN",
                fix="look for damaged weights with --check-finite; in float16, load in bfloat16 or float32",
            )
        if options.temperature == 0:
            return logits_BV.argmax(dim=-1).cpu()
        scores = logits_BV.float().cpu()
        # From the largest down, so that no temperature, however small, makes an infinity of it.
        scores = (scores - scores.amax(dim=-1, keepdim=True)) / max(options.temperature, SMALLEST_TEMPERATURE)
        if 0 < options.top_k < scores.shape[-1]:
            least = scores.topk(options.top_k, dim=-1).values[:, -1:]
            scores = scores.masked_fill(scores < least, float("-inf"))
        probabilities = scores.softmax(dim=-1)
        if options.top_p < 1:
            probabilities = _nucleus(probabilities, options.top_p)
        return torch.multinomial(probabilities, 1, generator=self._generator)[:, 0]


def _nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the smallest set of tokens whose mass reaches top_p (arXiv 1904.09751); the likeliest always stays."""
    ordered, order = probabilities.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    beyond = before >= top_p
    beyond[:, 0] = False
    return torch.zeros_like(probabilities).scatter(-1, order, ordered.masked_fill(beyond, 0.0))

"""Attention in which every head has a sink: a logit that takes its share of probability, and gives no value.

T new positions, L cached ones and new, B requests, K key-value heads, G query heads for each, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SCORES = 1 << 24
"""Scores that are held at once, at most, or those of one position."""


@dataclass(frozen=True, slots=True)
class Sinks:
    """This rank's heads' logits [K·G], and how many positions a query attends to, its own among them; 0 for all."""

    logits: torch.Tensor
    window: int

    def prefill(self, q_HTD: torch.Tensor, k_KLD: torch.Tensor, v_KLD: torch.Tensor) -> torch.Tensor:
        """One request, whose last T of L positions are queries, [K·G, T, D]; a block of them after another."""
        heads, new, width = q_HTD.shape
        total = k_KLD.shape[1]
        rows = max(SCORES // (heads * total), 1)
        out = []
        for start in range(total - new, total, rows):
            stop = min(start + rows, total)
            first = max(start - self.window + 1, 0) if self.window else 0
            positions_T = torch.arange(start, stop, device=q_HTD.device)
            q_KGTD = q_HTD[:, start - total + new : stop - total + new].reshape(len(k_KLD), -1, stop - start, width)
            seen_TL = self._seen(positions_T, first, stop)
            out.append(self._attend(q_KGTD, k_KLD[:, first:stop], v_KLD[:, first:stop], seen_TL).flatten(0, 1))
        return out[0] if len(out) == 1 else torch.cat(out, dim=1)

    def decode(
        self, q_BKGD: torch.Tensor, keys_BKLD: torch.Tensor, values_BKLD: torch.Tensor, positions_B: torch.Tensor
    ) -> torch.Tensor:
        """One new position a request, [B, K, G, D]."""
        seen_BL = self._seen(positions_B, 0, keys_BKLD.shape[2])
        out = self._attend(q_BKGD[..., None, :], keys_BKLD, values_BKLD, seen_BL[:, None, None, None])
        return out.squeeze(-2)

    def _seen(self, positions: torch.Tensor, first: int, stop: int) -> torch.Tensor:
        """[positions, stop - first]: which positions a query at each of them attends to."""
        behind = positions[:, None] - torch.arange(first, stop, device=positions.device)
        return (behind >= 0) & (behind < self.window) if self.window else behind >= 0

    def _attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """[..., K, G, T, D]; keys and values [..., K, L, D]. The softmax, in float32, has one column more."""
        scores = (q @ keys[..., None, :, :].mT * q.shape[-1] ** -0.5).masked_fill(~seen, float("-inf"))
        sinks = self.logits.view(keys.shape[-3], -1, 1, 1).expand(*scores.shape[:-1], 1)
        shares = torch.cat((scores, sinks), dim=-1).softmax(dim=-1, dtype=torch.float32)
        return shares[..., :-1].to(values.dtype) @ values[..., None, :, :]

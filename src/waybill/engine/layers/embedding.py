"""Token embedding and output head, with vocabulary rows cut across ranks and padded alike."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F

from waybill.engine.blueprint import EMBEDDING, HEAD
from waybill.engine.context import get_global_ctx
from waybill.engine.distributed import all_gather_last, all_reduce
from waybill.engine.layers.base import BaseOP, Parameters


class VocabParallelEmbedding(BaseOP):
    """Rows of the table are cut across ranks; a rank contributes zeros for tokens it does not hold."""

    def __init__(self, parameters: Parameters) -> None:
        self.weight = parameters.empty(EMBEDDING)
        self._tp = parameters.tp

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, H]."""
        if self._tp.size == 1:
            return F.embedding(ids_T, self.weight)
        rows = self.weight.shape[0]
        local_T = ids_T - self._tp.rank * rows
        mine_T = (local_T >= 0) & (local_T < rows)
        x_TH = F.embedding(local_T.clamp(0, rows - 1), self.weight)
        return all_reduce(x_TH * mine_T[:, None])


class ParallelLMHead(BaseOP):
    """Logits of each request's last position. Tied, it uses the embedding's rows and owns none."""

    def __init__(self, parameters: Parameters, embedding: VocabParallelEmbedding) -> None:
        self._embedding = embedding
        self._vocab = parameters.config.vocab_size
        self.weight = None if parameters.config.tie_word_embeddings else parameters.empty(HEAD)

    @property
    def is_tied(self) -> bool:
        """Whether the embedding's rows serve as the head."""
        return self.weight is None

    def untie(self, weight: torch.Tensor) -> None:
        """Honour a stored head that is not the embedding."""
        warnings.warn(
            "config.json ties the head to the embedding, and the file holds a different lm_head.weight; "
            "the file's head is used",
            stacklevel=2,
        )
        self.weight = weight

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [B, vocab]: the last position of every request, padding rows cut off."""
        x_BH = x_TH.index_select(0, get_global_ctx().batch.ends)
        weight = self._embedding.weight if self.weight is None else self.weight
        return all_gather_last(F.linear(x_BH, weight))[:, : self._vocab]

"""Token embedding and output head, with vocabulary rows cut across ranks and padded alike."""

from __future__ import annotations

import warnings

import torch

from waybill.engine.context import get_global_ctx
from waybill.engine.distributed import all_gather_last, all_reduce
from waybill.engine.layers.base import BaseOP, Parameters
from waybill.engine.layers.matrix import FloatMatrix, make_matrix
from waybill.families.decoder import EMBEDDING, HEAD


class VocabParallelEmbedding(BaseOP):
    """Rows of the table are cut across ranks; a rank contributes zeros for tokens it does not hold."""

    def __init__(self, parameters: Parameters) -> None:
        self.matrix = make_matrix(parameters, EMBEDDING)
        self._tp = parameters.tp
        self._rows = -(-parameters.config.vocab_size // parameters.tp.size)

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, H]."""
        if self._tp.size == 1:
            return self.matrix.rows(ids_T)
        local_T = ids_T - self._tp.rank * self._rows
        mine_T = (local_T >= 0) & (local_T < self._rows)
        x_TH = self.matrix.rows(local_T.clamp(0, self._rows - 1))
        return all_reduce(x_TH * mine_T[:, None])


class ParallelLMHead(BaseOP):
    """Logits of each request's last position. Tied, it uses the embedding's rows and owns none."""

    def __init__(self, parameters: Parameters, embedding: VocabParallelEmbedding) -> None:
        self._embedding = embedding
        self._parameters = parameters
        self._vocab = parameters.config.vocab_size
        if not parameters.config.tie_word_embeddings:
            self.matrix = make_matrix(parameters, HEAD)

    @property
    def is_tied(self) -> bool:
        """Whether the embedding's rows serve as the head."""
        return not hasattr(self, "matrix")

    @property
    def weight(self) -> torch.Tensor | None:
        """The head's own float weight, or None when it has none."""
        matrix = getattr(self, "matrix", None)
        return matrix.weight if isinstance(matrix, FloatMatrix) else None

    def untie(self) -> None:
        """Make room for a stored head that is not the embedding."""
        warnings.warn(
            "config.json ties the head to the embedding, and the file holds a different lm_head.weight; "
            "the file's head is used",
            stacklevel=2,
        )
        with torch.device("meta"):
            self.matrix = make_matrix(self._parameters, HEAD)

    def retie(self) -> None:
        """Take `untie` back."""
        del self.matrix

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [B, vocab]: the last position of every request, padding rows cut off."""
        x_BH = x_TH.index_select(0, get_global_ctx().batch.ends)
        matrix = self._embedding.matrix if self.is_tied else self.matrix
        return all_gather_last(matrix.product(x_BH))[:, : self._vocab]

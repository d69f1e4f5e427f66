"""What an export decides about its graphs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`exact`: packed products accumulate in float instead of rounding activations to 8 bits. `all_logits`: of every
    position, for scoring, instead of each request's last.
    """

    ep: str = "cpu"
    exact: bool = False
    all_logits: bool = False

"""Rotary position embeddings: where configs state them, and the frequencies they mean.

transformers 4 writes `rope_theta` and `rope_scaling` side by side, transformers 5 one `rope_parameters`; `type`
is the old spelling of `rope_type`. Formulas: RoPE (arXiv 2104.09864), linear interpolation (2306.15595), Llama 3.1's
smooth band (its reference code), YaRN (2309.00071).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from waybill.config.fields import Fields, positive
from waybill.errors import BadConfig, ConfigConflict, UnsupportedRope, WaybillError

REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
"""Rope types this library computes, and the positive numbers each cannot do without."""


_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """What the rotary embedding needs. `scaling` is None for plain RoPE, else its parameters with `rope_type`."""

    head_dim: int
    rotary_dim: int
    max_position: int
    base: float
    scaling: Mapping[str, Any] | None = None

    @property
    def rope_type(self) -> str:
        """`default`, `linear`, `llama3` or `yarn`."""
        return str(self.scaling["rope_type"]) if self.scaling else "default"

    def frequencies(self) -> tuple[list[float], float]:
        """Inverse frequencies `[rotary_dim / 2]` in radians per position, and the factor on cos and sin."""
        dim = self.rotary_dim
        plain = [self.base ** (-i / dim) for i in range(0, dim, 2)]
        if self.scaling is None:
            return plain, 1.0
        if self.rope_type == "linear":
            return [f / self.scaling["factor"] for f in plain], 1.0
        if self.rope_type == "llama3":
            return _llama3(plain, self.scaling), 1.0
        return _yarn(plain, self.scaling, dim, self.base), _yarn_attention_factor(self.scaling)


def _llama3(plain: list[float], scaling: Mapping[str, Any]) -> list[float]:
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    context = scaling["original_max_position_embeddings"]
    out = []
    for f in plain:
        turns = context * f / (2 * math.pi)  # full rotations over the original context
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        out.append((1 - smooth) * f / factor + smooth * f)
    return out


def _by_factors(scaling: Mapping[str, Any], head_dim: int, base: float) -> dict[str, Any] | None:
    """Llama 3.1's numbers, when the factors of all frequencies, which GGUF files keep instead, are theirs."""
    factors = scaling.get("factors")
    if not isinstance(factors, list) or len(factors) != head_dim // 2 or not all(map(positive, factors)):
        return None
    usual = {"rope_type": "llama3", "factor": max(factors), "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             _ORIGINAL: 8192}  # fmt: skip
    plain = [base ** (-i / head_dim) for i in range(0, head_dim, 2)]
    wanted = [f / scaled for f, scaled in zip(plain, _llama3(plain, usual), strict=True)]
    same = all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(factors, wanted, strict=True))
    return usual if same and "with" not in scaling["rope_type"] else None


def _yarn(plain: list[float], scaling: Mapping[str, Any], dim: int, base: float) -> list[float]:
    context = scaling["original_max_position_embeddings"]

    def dimension(rotations: float) -> float:
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = dimension(scaling.get("beta_fast") or 32)
    high = dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    out = []
    for i, f in enumerate(plain):
        interpolated = min(max((i - low) / (high - low), 0.0), 1.0)
        out.append(interpolated * f / scaling["factor"] + (1 - interpolated) * f)
    return out


def _yarn_attention_factor(scaling: Mapping[str, Any]) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)


def read_rotary(fields: Fields, head_dim: int, notices: list[str]) -> RotaryConfig:
    """Read both spellings; every contradiction or unknown kind is appended to `fields.problems`."""
    raw, problems, where = fields.raw, fields.problems, fields.where
    max_position = fields.integer("max_position_embeddings")
    blocks = {key: raw[key] for key in ("rope_parameters", "rope_scaling") if raw.get(key)}
    if not blocks and (assumed := fields.defaults.get("rope_parameters")):
        blocks = {"rope_parameters": {key: value for key, value in assumed.items() if key != "rope_theta"}}
        notices.append(f"{where} states no rope_parameters; the class default {assumed['rope_type']} is used")
    for key, block in blocks.items():
        if not isinstance(block, Mapping):
            problems.append(
                BadConfig(
                    f"{key} is not an object",
                    where=f"{where}: {key}",
                    expected='{"rope_type": …, …} or null',
                    found=repr(block)[:120],
                    fix=f"state {key} in {where} as its producer published it",
                )
            )
            return RotaryConfig(head_dim, head_dim, max_position, 1.0)
        if any(isinstance(value, Mapping) for value in block.values()):
            problems.append(
                UnsupportedRope(
                    "rotary parameters per layer type are not supported",
                    where=f"{where}: {key}",
                    expected="one set of numbers for all layers",
                    found=str(block)[:160],
                    fix="use a checkpoint whose layers share one rotary embedding",
                )
            )
            return RotaryConfig(head_dim, head_dim, max_position, 1.0)
    base = _agreed_base(fields, blocks, notices)
    merged = [_normalized(block, key, where, problems) for key, block in blocks.items()]
    if len(merged) == 2 and merged[0] != merged[1]:
        problems.append(_conflict(where, "rope_parameters and rope_scaling", merged))
    scaling: dict[str, Any] = merged[0] if merged else {"rope_type": "default"}
    scaling = _by_factors(scaling, head_dim, base) or scaling
    if raw.get("partial_rotary_factor") is not None and scaling["rope_type"] != "default":
        scaling.setdefault("partial_rotary_factor", raw["partial_rotary_factor"])
    if _supported(scaling, where, problems) and scaling["rope_type"] != "default":
        # The length before scaling: beside the rope block, in it, or the plain length.
        if raw.get(_ORIGINAL) is not None:
            scaling[_ORIGINAL] = raw[_ORIGINAL]
        scaling.setdefault(_ORIGINAL, max_position)
        before = len(problems)
        _check_numbers(scaling, where, problems)
        rotary = RotaryConfig(head_dim, head_dim, max_position, base, scaling)
        if len(problems) == before and not _computes(rotary):
            problems.append(_unusable(scaling | {"rope_theta": base}, where))
        return rotary
    return RotaryConfig(head_dim, head_dim, max_position, base)


def _agreed_base(fields: Fields, blocks: Mapping[str, Mapping[str, Any]], notices: list[str]) -> float:
    places = {
        f"{key}.rope_theta": block["rope_theta"] for key, block in blocks.items() if block.get("rope_theta") is not None
    }
    if fields.stated("rope_theta"):
        places["rope_theta"] = fields.raw["rope_theta"]
    if len({str(float(v)) if positive(v) else str(v) for v in places.values()}) > 1:
        fields.problems.append(_conflict(fields.where, "two places for the RoPE base", places))
    if not places:
        base = fields.number("rope_theta")
        notices.append(f"{fields.where} states no rope_theta; the class default {base:g} is used")
        return base
    key, value = next(iter(places.items()))
    return Fields({key: value}, {}, fields.problems, fields.where).number(key)


def _conflict(where: str, what: str, found: Any) -> ConfigConflict:
    return ConfigConflict(
        f"{what} disagree",
        where=where,
        expected="one value",
        found=str(found)[:200],
        fix="keep the one the model was trained with, remove the other",
    )


def _normalized(block: Mapping[str, Any], key: str, where: str, problems: list[WaybillError]) -> dict[str, Any]:
    """The block without the base, and with `rope_type` as the only spelling of the kind."""
    # A kind that is no text is spelled out, and then no kind that is known.
    kinds = {str(block[k]) for k in ("rope_type", "type") if block.get(k) is not None}
    if len(kinds) > 1:
        problems.append(_conflict(f"{where}: {key}", "type and rope_type", sorted(kinds)))
    rest = {k: v for k, v in block.items() if k not in ("rope_theta", "type", "rope_type") and v is not None}
    return {"rope_type": sorted(kinds)[0] if kinds else "default", **rest}


def _supported(scaling: Mapping[str, Any], where: str, problems: list[WaybillError]) -> bool:
    kind = scaling["rope_type"]
    found = None
    if kind not in REQUIRED:
        found = f"rope_type {kind!r}"
    elif scaling.get("mrope_section"):
        found = "multimodal sections (mrope_section)"
    elif scaling.get("partial_rotary_factor", 1.0) != 1.0:
        found = f"partial_rotary_factor {scaling['partial_rotary_factor']}"
    if found is None:
        return True
    problems.append(
        UnsupportedRope(
            "this kind of rotary embedding is not supported",
            where=where,
            expected=" | ".join(REQUIRED),
            found=found,
            fix="use a checkpoint with one of the supported kinds",
        )
    )
    return False


def _computes(rotary: RotaryConfig) -> bool:
    try:
        frequencies, factor = rotary.frequencies()
    except (ArithmeticError, ValueError):
        return False
    return all(0 < f < math.inf for f in frequencies) and 0 < factor < math.inf


def _unusable(numbers: Mapping[str, Any], where: str) -> BadConfig:
    return BadConfig(
        f"the {numbers['rope_type']} rotary embedding has no usable frequencies",
        where=where,
        expected="positive finite frequencies",
        found=str(numbers)[:160],
        fix="restore the rope parameters the model was published with",
    )


def _check_numbers(scaling: Mapping[str, Any], where: str, problems: list[WaybillError]) -> None:
    kind = scaling["rope_type"]
    given = {key: scaling.get(key) for key in REQUIRED[kind]}
    for key in ("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
                "mscale_all_dim"):  # fmt: skip
        if scaling.get(key) is not None:
            given[key] = scaling[key]
    wrong = {k: v for k, v in given.items() if not positive(v)}
    if not wrong and kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        wrong = {k: given[k] for k in ("low_freq_factor", "high_freq_factor")}
    if wrong:
        problems.append(
            BadConfig(
                f"the {kind} rotary embedding lacks usable numbers",
                where=where,
                expected=", ".join(f"{key}: a positive number" for key in wrong)
                + (", low below high" if "low_freq_factor" in wrong else ""),
                found=str(wrong)[:160],
                fix="restore the rope parameters the model was published with",
            )
        )

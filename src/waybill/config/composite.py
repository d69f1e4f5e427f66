"""Configs of models that are several networks: what is common to them. The sizes of each network are its family's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from waybill.config.fields import Fields
from waybill.config.model import ModelConfig, read_dtype, read_model_config
from waybill.errors import BadConfig, UnsupportedFeature, WaybillError


@dataclass(frozen=True, slots=True, kw_only=True)
class Composite:
    """What plans ask of any config. `text` is the decoder-only language model inside, where there is one."""

    model_type: str
    architectures: list[str]
    dtype: str | None
    """The safetensors tag of the dtype config.json states, if it does."""
    vocab_size: int
    tie_word_embeddings: bool
    text: ModelConfig | None = None

    @property
    def biases_scores(self) -> bool:
        """Whether something is added to the decoder's attention scores: relative positions."""
        return False

    @property
    def context_length(self) -> int:
        """Positions of the decoder: the most tokens a request may grow to."""
        return self.text.rotary_config.max_position if self.text is not None else 0

    @property
    def hidden_size(self) -> int:
        """Of the decoder."""
        return self.text.hidden_size if self.text is not None else 0

    def run_facts(self, hf_config: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
        """What running this model takes besides its graphs: the tokens that begin an answer or stand for pictures.

        Raises:
            BadConfig: a file states one of them in a way that means nothing; planning asks, so that it is told then.
        """
        return {}

    def parallel_obstacles(self, tp: int) -> list[str]:
        """Why the model cannot be cut into `tp` ranks: no target cuts a model of several networks."""
        return [] if tp == 1 else [f"a {self.model_type} model is not cut into ranks"]

    def legal_tp_sizes(self) -> tuple[int, ...]:
        """Every number of ranks this model can be cut into."""
        return (1,)


Config = ModelConfig | Composite


def nested(raw: Mapping[str, Any], key: str, problems: list[WaybillError], where: str) -> dict[str, Any]:
    """An inner config; empty, and refused, when it is missing or no object."""
    value = raw.get(key)
    if isinstance(value, Mapping):
        return dict(value)
    problems.append(
        BadConfig(
            f"{key} is missing" if value is None else f"{key} is not an object",
            where=f"{where}: {key}",
            expected="an object with the sizes of that network",
            found="no such field" if value is None else repr(value)[:120],
            fix=f"state {key} in {where} as its producer published it",
        )
    )
    return {}


def read_text(
    raw: Mapping[str, Any], problems: list[WaybillError], notices: list[str], *, where: str = "config.json"
) -> ModelConfig | None:
    """The language model inside: its own config, tied and typed as the outer level says where the inner is silent."""
    inner = nested(raw, "text_config", problems, where)
    if not inner:
        return None
    tie = {"text_config": inner.get("tie_word_embeddings"), "top level": raw.get("tie_word_embeddings")}
    said = {place: flag for place, flag in tie.items() if flag is not None}
    if len(set(map(repr, said.values()))) > 1:  # of any type: strangers wrote them
        notices.append(f"{where}: tie_word_embeddings is {said}; the head is taken to be tied")
    if any(flag is True for flag in said.values()):
        inner["tie_word_embeddings"] = True
    inner.pop("quantization_config", None)
    model, found, notes = read_model_config(inner, f"{where}: text_config")
    problems += found
    notices += notes
    if model is not None and model.hidden_size_per_layer_input:
        problems.append(
            UnsupportedFeature(
                "per-layer inputs of a decoder that is given embeddings are not supported",
                where=f"{where}: text_config: hidden_size_per_layer_input",
                expected="0, or no such field: these inputs are looked up by tokens, which this decoder never sees",
                found=str(model.hidden_size_per_layer_input),
                fix="export the language model by itself",
            )
        )
    if model is not None and model.sinks:
        problems.append(
            UnsupportedFeature(
                "a decoder with attention sinks inside a larger model is not supported",
                where=f"{where}: text_config: architectures",
                expected="a decoder without sinks",
                found=model.architectures[0],
                fix="load the language model by itself",
            )
        )
    return model


def read_outer_dtype(raw: Mapping[str, Any], fields: Fields, notices: list[str]) -> str | None:
    """The dtype the outer level states, or else an inner one."""
    stated = read_dtype(fields, notices)
    for key in ("text_config", "vision_config", "audio_config"):
        inner = raw.get(key)
        if stated is None and isinstance(inner, Mapping):
            stated = read_dtype(Fields(inner, {}, fields.problems, f"{fields.where}: {key}"), notices)
    return stated


def choice(fields: Fields, key: str, known: tuple[str, ...]) -> str:
    """A field that names one of several things; another is refused as a feature that is not there."""
    value = fields.text(key)
    if value not in known and key not in fields.wrong:
        fields.problems.append(
            UnsupportedFeature(
                f"{key} {value!r} is not supported",
                where=f"{fields.where}: {key}",
                expected=" | ".join(known),
                found=repr(value)[:120],
                fix="check the field against the model's published config",
            )
        )
    return value


def first_id(key: str, places: Mapping[str, Mapping[str, Any]], vocab_size: int) -> int | None:
    """A token id, from the first place that states it; `places` are files by name.

    Raises:
        BadConfig: what is stated is none of the model's tokens.
    """
    stated = ((where, place[key]) for where, place in places.items() if place.get(key) is not None)
    where, value = next(stated, ("", None))
    if value is None or (type(value) is int and 0 <= value < vocab_size):
        return value
    raise BadConfig(
        f"{key} is not a token id",
        where=f"{where}: {key}",
        expected=f"a token below vocab_size {vocab_size}",
        found=repr(value)[:120],
        fix=f"correct {key} in {where}, or remove it",
    )


def divides(fields: Fields, whole: int, by: int, names: tuple[str, str]) -> None:
    """Refuse a number that should divide another and does not."""
    if whole % by and not fields.wrong & set(names):
        fields.problems.append(
            BadConfig(
                f"{names[1]} cannot be right",
                where=f"{fields.where}: {names[1]}",
                expected=f"a divisor of {names[0]} {whole}",
                found=str(by),
                fix="check the field against the model's published config",
            )
        )

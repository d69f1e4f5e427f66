"""A run of transformer layers with biases, layer norms or cross-attention, as data: T5's, Whisper's, vision towers'.

One description serves two readers: the parameters a plan binds, here, and the graph that uses them. Layers normalize
first: x + attention(norm(x)), then x + cross-attention(norm(x)) where there is one, then x + feed-forward(norm(x)).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from waybill.plan.parameter import Kind, Packing, ParameterSpec, Part


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNames:
    """Where a layer's modules lie, relative to the layer. `up` has two members where the activation is gated."""

    attention: str
    attention_norm: str
    projections: tuple[str, str, str, str]
    """q, k, v and output, relative to the attention."""
    up: tuple[str, ...]
    down: str
    feed_forward_norm: str
    cross: str | None = None
    cross_norm: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Sizes and names of a run of layers. `fields` name the config fields of hidden, heads and inner, for messages."""

    path: str
    """Where the layers lie, numbered."""
    layers: int
    hidden: int
    heads: int
    head_dim: int
    inner: int
    activation: str
    eps: float
    names: LayerNames
    fields: tuple[str, str, str]
    rms: bool = False
    """Norms only scale by the root of the mean square; otherwise they also centre, and have a bias."""
    scale: float | None = None
    """On attention scores; None is 1 / √head_dim."""
    biased: frozenset[str] = field(default_factory=frozenset)
    """Which linear modules have a bias: `q`, `k`, `v`, `out`, `up`, `down`."""

    def layer(self, number: int) -> str:
        """The path of one layer."""
        return f"{self.path}.{number}"


def stack_parameters(stack: Stack, packings: Mapping[str, Packing]) -> Iterator[ParameterSpec]:
    """Every parameter of the layers, in the order they run."""
    names = stack.names
    for number in range(stack.layers):
        path = stack.layer(number)
        for attention, norm in ((names.attention, names.attention_norm), (names.cross, names.cross_norm)):
            if attention is not None and norm is not None:
                yield from norm_parameters(f"{path}.{norm}", stack.hidden, stack.fields[0], centred=not stack.rms)
                yield from _attention(stack, f"{path}.{attention}", packings)
        yield from norm_parameters(
            f"{path}.{names.feed_forward_norm}", stack.hidden, stack.fields[0], centred=not stack.rms
        )
        hidden, inner = (stack.fields[0], stack.hidden), (stack.fields[2], stack.inner)
        for up in names.up:
            yield from linear(f"{path}.{up}", inner, hidden, packings, bias="up" in stack.biased)
        yield from linear(f"{path}.{names.down}", hidden, inner, packings, bias="down" in stack.biased)


def _attention(stack: Stack, path: str, packings: Mapping[str, Packing]) -> Iterator[ParameterSpec]:
    heads = (f"{stack.fields[1]} {stack.heads} × head_dim", stack.heads * stack.head_dim)
    hidden = (stack.fields[0], stack.hidden)
    for role, name in zip(("q", "k", "v", "out"), stack.names.projections, strict=True):
        rows, columns = (hidden, heads) if role == "out" else (heads, hidden)
        yield from linear(f"{path}.{name}", rows, columns, packings, bias=role in stack.biased)


Size = tuple[str, int]
"""The config field that says a size, and the size."""


def linear(
    path: str, rows: Size, columns: Size, packings: Mapping[str, Packing], *, bias: bool
) -> Iterator[ParameterSpec]:
    """A matrix [rows, columns], and its bias."""
    name = f"{path}.weight"
    yield ParameterSpec(name=name, kind="linear", parts=(_part(rows, columns),), packing=packings.get(name))
    if bias:
        yield vector(f"{path}.bias", rows)


def norm_parameters(path: str, size: int, field: str, *, centred: bool) -> Iterator[ParameterSpec]:
    """A norm's weight, and its bias where it centres."""
    yield vector(f"{path}.weight", (field, size))
    if centred:
        yield vector(f"{path}.bias", (field, size))


def vector(name: str, size: Size) -> ParameterSpec:
    """A norm's weight or a bias."""
    return ParameterSpec(name=name, kind="vector", parts=(_part(size),))


def table(
    name: str, rows: Size, columns: Size, kind: Kind, packings: Mapping[str, Packing], tied_to: str | None = None
) -> ParameterSpec:
    """An embedding, a head, or learned positions."""
    packing = packings.get(name)
    return ParameterSpec(name=name, kind=kind, parts=(_part(rows, columns),), tied_to=tied_to, packing=packing)


def convolution(path: str, sizes: tuple[Size, ...], *, bias: bool) -> Iterator[ParameterSpec]:
    """A kernel [out, in, *extent], and its bias."""
    yield ParameterSpec(name=f"{path}.weight", kind="conv", parts=(_part(*sizes),))
    if bias:
        yield vector(f"{path}.bias", sizes[0])


def _part(*sizes: Size) -> Part:
    return Part(tuple(size for _, size in sizes), None, ", ".join(f"{name} {size}" for name, size in sizes))

"""A family of architectures, as what plans need of it: its config, its names, its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from waybill.checkpoint import Checkpoint
from waybill.codecs.grouping import split_role
from waybill.config.architectures import GGUF_ARCHITECTURE
from waybill.config.composite import Config
from waybill.config.gguf import LAYOUTS
from waybill.config.quantization import ComponentQuantizationManifest
from waybill.errors import WaybillError
from waybill.manifest import ComponentManifest
from waybill.manifest.naming import Naming, Spelling
from waybill.manifest.quantization import Policy, read_quantization
from waybill.plan.parameter import Merges, Packing, ParameterSpec
from waybill.rules import RuleTable


class Dialect(NamedTuple):
    """How a family's weights lie in GGUF files."""

    runtime: Callable[[str], str]
    """A stored name as the running model has it."""
    paired: Callable[[Mapping[str, Any], str], bool]
    """Whether the rows of a weight, by its runtime name, hold rotary pairs side by side."""


class Reading(NamedTuple):
    """A config, everything wrong with it, and what is worth a line. Without a config nothing can be planned."""

    config: Config | None
    problems: list[WaybillError]
    notices: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a family of architectures states its sizes, names its weights, and is cut into components.

    Names are runtime module names. `rules` take stored weights apart or drop them; `merges` put them together, for
    targets that want that.
    """

    name: str
    read: Callable[[Mapping[str, Any]], Reading]
    components: Callable[[Mapping[str, Any]], ComponentManifest]
    kind_of: Callable[[str], str]
    rules: Callable[[Any], RuleTable]
    parameters: Callable[[Any, Mapping[str, Packing], Merges], list[ParameterSpec]]
    merges: RuleTable = field(default_factory=lambda: RuleTable(()))
    spellings: Sequence[Spelling] = ()
    layer_fields: Mapping[str, str] = field(default_factory=dict)
    """Path of a run of layers to the config field that counts them, for messages."""
    gguf: Dialect | None = None
    """How GGUF files of this family are read, for a family that has such files."""

    def naming(self, hf_config: Mapping[str, Any]) -> Naming:
        """How a checkpoint of this family is read."""
        translate = self.gguf.runtime if self.gguf and GGUF_ARCHITECTURE in hf_config else None
        return Naming(self.components(hf_config), self.kind_of, self.spellings, translate)

    def paired_rows(self, hf_config: Mapping[str, Any], config: Config) -> Callable[[str], int]:
        """By runtime name, the rows of each head of a weight whose rotary pairs lie side by side; 0 for others."""
        dialect, text = self.gguf, config.text
        if dialect is None or text is None or GGUF_ARCHITECTURE not in hf_config:
            return lambda _: 0
        return lambda name: text.head_dim if dialect.paired(hf_config, name) else 0

    def policy(self, checkpoint: Checkpoint, problems: list[WaybillError]) -> Policy:
        """What each module of a checkpoint is packed as, by its metadata; problems are appended."""
        naming = self.naming(checkpoint.config)
        if checkpoint.metadata is not None:
            own = {t.name.removesuffix(".weight"): LAYOUTS.get(t.dtype) for t in checkpoint.tensors.values()}
            return Policy(naming, ComponentQuantizationManifest(), own)
        packed = {naming.component(split[0]) for name in checkpoint.tensors if (split := split_role(name)) is not None}
        found = read_quantization(checkpoint.config, checkpoint.side_files, naming.components, problems, packed - {""})
        return Policy(naming, found)

"""How a checkpoint's names are read: which spelling of a root it uses, whose a module is, and of what kind.

Three name spaces meet here: names as stored, runtime module names (the ones transformers' current classes have, which
rules, targets and components speak), and whatever names a quantizer wrote down, which may be either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from waybill.manifest.component import ComponentManifest, owns


class Spelling(NamedTuple):
    """A root as some checkpoints have it, the same root at run time, and whose files have it so."""

    stored: str
    runtime: str
    written_by: str = ""

    def __str__(self) -> str:
        writer = f" ({self.written_by})" if self.written_by else ""
        return f"{self.stored} for {self.runtime}{writer}"


@dataclass(frozen=True)
class Naming:
    """The one object that grouping, policy, routing and reports ask about a name."""

    components: ComponentManifest
    kind_of: Callable[[str], str]
    """Linear modules from heads, tables and banks, by runtime module name."""
    spellings: Sequence[Spelling] = field(default=())
    translate: Callable[[str], str] | None = None
    """For files that name every weight in their own way: a stored name as the running model has it."""

    @cached_property
    def _by_stored(self) -> dict[str, Spelling]:
        return {spelling.stored: spelling for spelling in self.spellings}

    @cached_property
    def _deepest(self) -> int:
        return max((spelling.stored.count(".") + 1 for spelling in self.spellings), default=0)

    def spelling_of(self, stored: str) -> Spelling | None:
        """The longest spelling that begins this name, by whole segments."""
        if not self.spellings:
            return None
        segments = stored.split(".", self._deepest)
        for end in range(min(len(segments), self._deepest), 0, -1):
            if (found := self._by_stored.get(".".join(segments[:end]))) is not None:
                return found
        return None

    def runtime(self, stored: str) -> str:
        """A stored name as the running model has it."""
        if self.translate is not None:
            return self.translate(stored)
        spelling = self.spelling_of(stored)
        return stored if spelling is None else spelling.runtime + stored.removeprefix(spelling.stored)

    def component(self, stored: str) -> str:
        """The component that owns a stored weight or module; "" when none does, which a target calls unclaimed."""
        if self.components.only is not None:
            return self.components.only.name
        owner = self.components.owner_of(self.runtime(stored).removesuffix(".weight"))
        return owner.name if owner is not None else ""

    def place(self, stored: str) -> str:
        """A stored name for messages, with the component that owns it where there are several."""
        return stored if self.components.only is not None else f"{self.component(stored) or 'no component'}: {stored}"

    def names(self, stored: str) -> tuple[str, ...]:
        """Every name a rule may mean a stored module by: as stored, at run time, by its component's source roots, and
        in the other spellings, because whoever wrote the metadata may have loaded the model by another class."""
        runtime = self.runtime(stored)
        owner = self.components.owner_of(runtime)
        rooted = owner.source_module_names(runtime) if owner else ()
        spelled = (s.stored + runtime.removeprefix(s.runtime) for s in self.spellings if owns(s.runtime, runtime))
        return tuple(dict.fromkeys((stored, runtime, *rooted, *spelled)))

    def kind(self, stored: str) -> str:
        """`linear`, `head`, `embedding` and so on, of a stored module."""
        return self.kind_of(self.runtime(stored))

    def used(self, stored: Iterable[str]) -> dict[Spelling, int]:
        """How many of these names use each spelling."""
        return dict(Counter(found for name in stored if (found := self.spelling_of(name)) is not None))

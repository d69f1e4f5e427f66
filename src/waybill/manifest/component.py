"""The components of a package: resolved once, and asked by routing, construction, quantization and reports alike.

Two name spaces meet here. Quantizer metadata and checkpoints speak of Hugging Face modules; a component's own modules
have paths that begin at the component. A descriptor's source paths say where the one lies in the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from waybill.errors import UnresolvedComponent

Sources = Mapping[str, Sequence[str]]
"""Component name to the Hugging Face module paths whose weights it owns; "" is the whole model."""
SourcesHook = Callable[..., Sources]
"""Called with model_type= and hf_config=, for architectures whose sources depend on the config."""
Aliases = Mapping[str, Mapping[str, str]]
"""Component name to {local module path: Hugging Face module path}, where no root explains the one by the other."""
AliasHook = Callable[..., Aliases]
"""Called with hf_config=, for aliases that depend on the config; it needs no model type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentDescriptor:
    """One part of a model: its name in the package, where it hangs in the whole model, what it is for, what it owns."""

    name: str
    module_attribute_path: str
    role: str
    source_paths: tuple[str, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Local module path to Hugging Face module path, for it and all below it, where no root explains the one by the
    other."""
    excluded_methods: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Module path (`*` is any one segment) to the quantization methods that never pack it or anything below it."""

    def excludes(self, module: str, method: str) -> bool:
        """Whether the model itself keeps a module float under a method, whatever metadata says."""
        return any(method in methods and _covers(path, module) for path, methods in self.excluded_methods.items())

    def source_module_names(self, local_path: str) -> tuple[str, ...]:
        """The Hugging Face module names a local module path may stand for.

        What an alias covers, and a path that lies below a root or an alias already, has one name and is put under no
        root: a top-level head does not become a head of the decoder's. Any other path is anchored where it shares a
        segment with a root, the nearer to the root's end the better: `model.layers.0` at the root `model.text.layers`
        or `model.text` is `model.text.layers.0`. A path that shares none lies below the component's own root, the one
        that ends as the component is called or hangs: `block.0` of the encoder is `encoder.block.0`.
        """
        for path in _upwards(local_path) if self.aliases else ():
            if path in self.aliases:
                return (self.aliases[path] + local_path.removeprefix(path),)
        if any(owns(root, local_path) for root in (*self.source_paths, *self.aliases.values())):
            return (local_path,)
        anchored = [found for root in self.source_paths if (found := _anchored(root, local_path)) is not None]
        if anchored:
            nearest = min(beyond for beyond, _ in anchored)
            return tuple(dict.fromkeys(name for beyond, name in anchored if beyond == nearest))
        called = {self.name, self.module_attribute_path.rpartition(".")[2]}
        own = [root for root in self.source_paths if root.rpartition(".")[2] in called]
        return tuple(f"{root}.{local_path}" for root in own) or (local_path,)


@dataclass(frozen=True, slots=True)
class ComponentManifest:
    """All components of a package. `is_whole` is false for a selection of a larger package's components."""

    components: tuple[ComponentDescriptor, ...]
    is_whole: bool = True

    def by_name(self, name: str) -> ComponentDescriptor:
        """The component of that name.

        Raises:
            UnresolvedComponent: there is none.
        """
        for component in self.components:
            if component.name == name:
                return component
        raise UnresolvedComponent(
            "the model has no component of that name",
            where=name,
            expected=" | ".join(component.name for component in self.components),
            found=repr(name),
            fix="use the name of a component this model has",
        )

    @property
    def only(self) -> ComponentDescriptor | None:
        """The component of a package that has one: what is said of the whole model is said of it."""
        return self.components[0] if self.is_whole and len(self.components) == 1 else None

    def owner_of(self, module: str) -> ComponentDescriptor | None:
        """The component whose source path is the longest that holds a Hugging Face module; None when none does."""
        found, length = None, -1
        for component in self.components:
            for root in (*component.source_paths, *component.aliases.values()):
                if len(root) > length and owns(root, module):
                    found, length = component, len(root)
        return found

    def select(self, names: Sequence[str]) -> ComponentManifest:
        """Some of the components. Model-wide rules do not apply to a selection, even of one."""
        chosen = tuple(self.by_name(name) for name in names)
        return replace(self, components=chosen, is_whole=self.is_whole and len(chosen) == len(self.components))


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a package is for: its components in order, where each hangs in the whole model, and each one's role."""

    name: str
    components: Mapping[str, str]
    """Component name to the attribute path of its module; "" when the component is the whole model."""
    roles: Mapping[str, str]


def resolve_components(
    task: Task,
    sources: Sources,
    *,
    hook: SourcesHook | None = None,
    aliases: Aliases | None = None,
    alias_hook: AliasHook | None = None,
    excluded_methods: Mapping[str, Mapping[str, frozenset[str]]] | None = None,
    model_type: str | None = None,
    hf_config: Mapping[str, Any] | None = None,
) -> ComponentManifest:
    """Combine what the task, its roles and the model's source declarations say.

    A hook is asked when a model type is known (given, or in the config), and what it says replaces the static sources
    of the components it names. Without a model type it is not asked, and nothing is guessed in its place: static
    sources speak for models that have no hook. Aliases may depend on the config alone, so their hook is always asked.

    Raises:
        UnresolvedComponent: a component of the task has no role or no source path.
    """
    known = model_type or (hf_config or {}).get("model_type")
    skipped = hook is not None and not known
    stated: dict[str, Sequence[str]] = {} if skipped else dict(sources)
    if hook is not None and known:
        stated |= hook(model_type=known, hf_config=hf_config)
    hooked = alias_hook(hf_config=hf_config or {}) if alias_hook is not None else {}
    components = []
    for name, path in task.components.items():
        role, paths = task.roles.get(name), stated.get(name)
        if role is None or not paths:
            raise UnresolvedComponent(
                "a component of the task cannot be resolved",
                where=f"task {task.name}: {name}",
                expected="a role, and at least one source path",
                found=f"role {role or 'none'}, source paths {', '.join(paths or ()) or 'none'}",
                fix="state model_type: the model's sources depend on it"
                if skipped
                else "declare the component's sources beside the architecture",
            )
        components.append(
            ComponentDescriptor(
                name=name,
                module_attribute_path=path,
                role=role,
                source_paths=tuple(paths),
                aliases={**(aliases or {}).get(name, {}), **hooked.get(name, {})},
                excluded_methods=(excluded_methods or {}).get(name, {}),
            )
        )
    return ComponentManifest(tuple(components))


def owns(root: str, module: str) -> bool:
    """Whether a module is a root or lies below it, by whole path segments."""
    return not root or module == root or module.startswith(f"{root}.")


def _upwards(path: str) -> Iterator[str]:
    """The path, then what it lies in, to its first segment."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _anchored(root: str, local_path: str) -> tuple[int, str] | None:
    """A local path put at the last segment of a root that it has too, and how many more the root has beyond it."""
    local = local_path.split(".")
    for beyond, segment in enumerate(reversed(root.split("."))):
        if segment in local:
            return beyond, ".".join((root, *local[local.index(segment) + 1 :]))
    return None


def _covers(path: str, module: str) -> bool:
    """The same, where a `*` of the path stands for any one segment."""
    wanted = path.split(".")
    if wanted[-1] != "*" and f".{wanted[-1]}." not in f".{module}.":  # nearly every module
        return False
    segments = module.split(".")
    return len(segments) >= len(wanted) and all(w in ("*", s) for w, s in zip(wanted, segments, strict=False))

"""A model as an ONNX package: built from a checkpoint, saved whole, opened again."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from waybill.config.quantization import QuantizationConfig
from waybill.errors import Refused
from waybill.manifest import ComponentDescriptor, ComponentManifest
from waybill.onnx.component import Component, notices, unbound
from waybill.onnx.data import lay_out
from waybill.onnx.publish import publication, require_outside
from waybill.onnx.verify.entries import ComponentEntries, read_entries
from waybill.onnx.verify.structure import examine, locate, overlaps
from waybill.onnx.writing import Progress, all_bindings, all_tables, write_package


@dataclass(frozen=True, slots=True)
class Receipt:
    """What saving took and wrote: bytes of data and of linked checkpoint files, seconds, and of those in the flush."""

    folder: Path
    data_bytes: int
    linked_bytes: int
    seconds: float
    flush_seconds: float
    summary: str


@dataclass(frozen=True, slots=True)
class SavedComponent:
    """A component of a package on disk."""

    name: str
    folder: Path
    entries: ComponentEntries

    @property
    def descriptor(self) -> ComponentDescriptor:
        """What the manifest of the package says of it: its role, where it hangs, and what it owns."""
        return self.entries.descriptor

    @property
    def layout(self) -> QuantizationConfig | None:
        """How its metadata stated it to be packed; modules may differ, and None is float."""
        return self.entries.layout

    @property
    def nbytes(self) -> int:
        """Bytes of all initializers."""
        return sum(entry.nbytes for entry in self.entries.initializers.values())

    def model(self) -> ir.Model:
        """The graph; its initializers stay on disk until they are looked at.

        Raises:
            Refused: it refers to anything but what waybill.json lists, or is not the graph that was exported.
        """
        if problems := examine(self.folder, self.entries)[0]:
            raise Refused(problems)
        return ir.load(self.folder / self.entries.file)


class ModelPackage(Mapping[str, Component | SavedComponent]):
    """Component name to component: built and not yet written, or opened."""

    def __init__(self, components: Mapping[str, Component | SavedComponent]) -> None:
        self._components = dict(components)

    @classmethod
    def load(cls, folder: str | Path) -> ModelPackage:
        """Open a package that was saved; `waybill.verify` says whether it still is what was written.

        Raises:
            BadPackage: there is none, or its waybill.json is malformed.
        """
        entries = read_entries(folder)
        return cls({name: SavedComponent(name, Path(folder), own) for name, own in entries.components.items()})

    def __getitem__(self, name: str) -> Component | SavedComponent:
        return self._components[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._components)

    def __len__(self) -> int:
        return len(self._components)

    @property
    def nbytes(self) -> int:
        """Bytes of all initializers; one that several components use counts once."""
        built = self._built()
        if not built:
            places = {e.place: e.nbytes for saved in self._saved() for e in saved.entries.initializers.values()}
            return sum(places.values())
        brought = sum(binding.nbytes for binding in all_bindings(built).values())
        return brought + sum(table.nbytes for table in all_tables(built).values())

    @property
    def manifest(self) -> ComponentManifest:
        """What the components are: the same of a package that is built and of what it was saved as."""
        return ComponentManifest(tuple(component.descriptor for component in self.values()))

    @property
    def shared_bytes(self) -> int:
        """Bytes of weights that more than one component uses, and that are stored once."""
        uses = Counter(name for component in self._built().values() for name in component.bindings)
        every = all_bindings(self._built()) if uses else {}
        return sum(binding.nbytes for name, binding in every.items() if uses[name] > 1)

    @property
    def notices(self) -> list[str]:
        """What planning found worth a line; nothing for a package that was opened: it was about the checkpoint."""
        built = self._built()
        return notices(next(iter(built.values())).plan, built.values()) if built else []

    def _built(self) -> dict[str, Component]:
        return {name: component for name, component in self.items() if isinstance(component, Component)}

    def _saved(self) -> list[SavedComponent]:
        return [component for component in self.values() if isinstance(component, SavedComponent)]

    def save(
        self,
        folder: str | Path,
        *,
        overwrite: bool = False,
        link: bool = False,
        allow_unbound: bool = False,
        progress: Progress = lambda _: None,
    ) -> Receipt:
        """Write the package; it appears in `folder` whole, or not at all.

        Args:
            folder: where it goes; its parents are made.
            overwrite: replace a package that is there.
            link: refer to the checkpoint's own files by hard links where an initializer lies in them as it is.
            allow_unbound: save a skeleton, whose parameters have no bytes.
            progress: told of bytes that have reached their place.

        Raises:
            TargetExists, CannotWrite, CannotLink, UnboundPackage: nothing was written.
            WaybillError: a value is damaged or does not fit, or a file changed; nothing is left behind.
        """
        start = time.perf_counter()
        if saved := self._saved():
            return _copy(saved[0].folder, self.nbytes, Path(folder), overwrite, progress, start)
        components = self._built()
        first = next(iter(components.values()))
        if not first.bound and not allow_unbound:
            raise unbound(str(folder), len({name for c in components.values() for name in c.graph.parameters}))
        require_outside(Path(folder), first.plan.checkpoint.root)
        layout = lay_out(all_bindings(components), all_tables(components), link=link)
        with publication(Path(folder), overwrite=overwrite, nbytes=layout.data_bytes) as staging:
            write_package(components, layout, staging, progress)
            if first.bound:
                _reopen(staging)
            written = time.perf_counter()
        end = time.perf_counter()
        linked = sum(place.nbytes for name, place in layout.places.items() if name in layout.linked)
        summary = first.plan.summary() if first.bound else "skeleton: no weights"
        return Receipt(Path(folder), layout.data_bytes, linked, end - start, end - written, summary)


def _reopen(folder: Path) -> None:
    """Graph, bill and files agree, as they lie on the disk; the last look before the package is visible."""
    examined = [examine(folder, component) for component in read_entries(folder).components.values()]
    problems = [problem for found, _ in examined for problem in found]
    if problems := [*problems, *overlaps(entry for _, sound in examined for entry in sound)]:
        raise Refused(problems)


def _copy(source: Path, nbytes: int, folder: Path, overwrite: bool, progress: Progress, start: float) -> Receipt:
    """A package that is already on disk, file by file: nothing in it depends on where it lies."""
    require_outside(folder, source)
    for path in source.rglob("*"):
        if path.is_symlink() or not path.is_dir():
            locate(source, path.relative_to(source).as_posix())
    with publication(folder, overwrite=overwrite, nbytes=nbytes) as staging:
        shutil.copytree(source, staging, dirs_exist_ok=True)
        progress(nbytes)
        written = time.perf_counter()
    end = time.perf_counter()
    return Receipt(folder, nbytes, 0, end - start, end - written, "copied")

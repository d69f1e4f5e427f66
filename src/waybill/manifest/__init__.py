"""Which components a model has, what each is for, and how each one's weights are packed."""

from waybill.manifest.component import ComponentDescriptor, ComponentManifest, Task, resolve_components

__all__ = ["ComponentDescriptor", "ComponentManifest", "Task", "resolve_components"]

"""Every refusal, as one tree. The gate collects problems and raises them together, before a byte moves.

WaybillError
├── Refused                 several problems at once; `.problems` holds them
├── CheckpointError         what lies on disk
│   ├── NotACheckpoint      BadJson            PathEscape
│   ├── NoSafetensors       NotSafetensors     BadHeader
│   ├── WrongLength         MissingShard       BadIndex
│   └── DuplicateTensor     MissingTensor      FileChanged
├── HubError                what a hub answers
│   ├── BadHubId            NotOnHub           NoHubAccess
│   └── HubRateLimit        HubUnreachable     BadHubAnswer
├── ConfigError             what config.json says
│   ├── BadConfig           ConfigConflict     UnsupportedFeature
│   ├── UnsupportedArchitecture  UnsupportedRope  UnsupportedQuantization
│   └── BadPattern          ActOrder           UnresolvedComponent
├── PlanError               headers against what the target needs
│   ├── MissingWeight       MissingHead        IncompleteMerge
│   ├── UnclaimedWeight     ClaimedTwice       PrefixDrift
│   ├── ShapeMismatch       VocabMismatch      DtypeMismatch
│   ├── IncompleteWeight    PackingMismatch    UnboundParameter
│   └── ExpertMismatch      IllegalParallelism UnsupportedByRuntime
├── PackageError            writing, opening or proving a package
│   ├── TargetExists        TargetBusy         CannotWrite
│   ├── CannotLink          UnboundPackage     BadPackage
│   └── PackageMismatch     MissingRuntime
└── RunError                found while bytes move or tokens are made
    ├── NonFiniteWeight     ZeroPointMismatch  BadScales         CastOverflow
    ├── InexactScales
    ├── NoTokenizer         BadTemplate        BadRequest        DeviceUnavailable
    └── BadOption           OtherRankFailed
"""

from __future__ import annotations

from typing import ClassVar

from waybill.errors.refusal import Refused as Refused
from waybill.errors.refusal import WaybillError as WaybillError
from waybill.errors.refusal import printable as printable
from waybill.errors.refusal import some as some


class CheckpointError(WaybillError):
    """What lies on disk is not a whole checkpoint."""


class NotACheckpoint(CheckpointError, code="not-a-checkpoint"):
    """The path is neither a folder with a config.json nor a GGUF file."""


class BadJson(CheckpointError, code="bad-json"):
    """A JSON file cannot be read as the object it should be."""


class PathEscape(CheckpointError, code="path-escape"):
    """A file name leads out of the checkpoint directory."""


class NoSafetensors(CheckpointError, code="no-safetensors"):
    """There are no safetensors weights here, possibly another format."""


class NotSafetensors(CheckpointError, code="not-safetensors"):
    """A file named .safetensors holds something else."""


class BadHeader(CheckpointError, code="bad-header"):
    """A header breaks one of its format's promises: safetensors or GGUF.

    Of a GGUF file, `found` names the metadata key or the tensor.
    """


class WrongLength(CheckpointError, code="wrong-length"):
    """A file is shorter or longer than its header says."""


class MissingShard(CheckpointError, code="missing-shard"):
    """The index names files that are not on disk."""


class BadIndex(CheckpointError, code="bad-index"):
    """The index file is not a map from tensor names to file names."""


class DuplicateTensor(CheckpointError, code="duplicate-tensor"):
    """Two files hold a tensor of the same name."""


class MissingTensor(CheckpointError, code="missing-tensor"):
    """The index promises tensors that no file holds."""


class FileChanged(CheckpointError, code="file-changed"):
    """A file changed, shrank or failed between reading its header and reading its weights."""


class HubError(WaybillError):
    """A hub does not give what a checkpoint needs."""


class BadHubId(HubError, code="bad-hub-id"):
    """The id of a repository is malformed."""


class NotOnHub(HubError, code="not-on-hub"):
    """The hub has no such repository, revision or file, or shows it to others only."""


class NoHubAccess(HubError, code="no-hub-access"):
    """The hub wants to know who asks, or that a licence is accepted."""


class HubRateLimit(HubError, code="hub-rate-limit"):
    """The hub was asked too often."""


class HubUnreachable(HubError, code="hub-unreachable"):
    """The hub does not answer, breaks off, or may not be asked."""


class BadHubAnswer(HubError, code="bad-hub-answer"):
    """The hub answers with something else than it was asked for."""


class ConfigError(WaybillError):
    """config.json does not describe a model this library can build."""


class BadConfig(ConfigError, code="bad-config"):
    """A field is missing, of the wrong type, or out of range."""


class ConfigConflict(ConfigError, code="config-conflict"):
    """Two places state the same fact differently."""


class UnsupportedArchitecture(ConfigError, code="unsupported-architecture"):
    """No table knows this architecture."""


class UnsupportedFeature(ConfigError, code="unsupported-feature"):
    """The configuration asks for arithmetic that is not implemented."""


class UnsupportedRope(ConfigError, code="unsupported-rope"):
    """The rotary embedding is of a kind that is not implemented."""


class UnsupportedQuantization(ConfigError, code="unsupported-quantization"):
    """The checkpoint is packed in a format this version does not read."""


class BadPattern(ConfigError, code="bad-pattern"):
    """A pattern of the quantization metadata cannot be compiled, or their list is larger than any model needs."""


class UnresolvedComponent(ConfigError, code="unresolved-component"):
    """A component is asked for that the model does not have, or a component of a task has no role or no sources.

    Seen by those who add an architecture or call `ComponentManifest.by_name`.
    """


class ActOrder(ConfigError, code="act-order"):
    """The groups of a packed weight are permuted (desc_act), which is not supported."""


class PlanError(WaybillError):
    """Headers and target do not add up."""


class MissingWeight(PlanError, code="missing-weight"):
    """A parameter of the model has no tensor in the checkpoint."""


class MissingHead(PlanError, code="missing-head"):
    """The config says untied, and the file has no output head."""


class IncompleteMerge(PlanError, code="incomplete-merge"):
    """Some members of a merged parameter are there, not all."""


class UnclaimedWeight(PlanError, code="unclaimed-weight"):
    """A tensor in the checkpoint has no place in the model."""


class ClaimedTwice(PlanError, code="claimed-twice"):
    """Two tensors want the same place."""


class PrefixDrift(PlanError, code="prefix-drift"):
    """Every name carries a prefix the architecture does not use."""


class ShapeMismatch(PlanError, code="shape-mismatch"):
    """A tensor's shape is not what the config implies."""


class VocabMismatch(ShapeMismatch, code="vocab-mismatch"):
    """The embedding or head has another number of rows than vocab_size."""


class DtypeMismatch(PlanError, code="dtype-mismatch"):
    """A parameter needs float numbers, and the tensor holds something else."""


class IncompleteWeight(PlanError, code="incomplete-weight"):
    """A packed weight lacks one of its sidecars."""


class PackingMismatch(PlanError, code="packing-mismatch"):
    """Sidecars on disk and quantization metadata contradict each other."""


class ExpertMismatch(PlanError, code="expert-mismatch"):
    """Experts are missing, or there are more than the config says."""


class UnboundParameter(PlanError, code="unbound-parameter"):
    """An emitted graph and the plan for its weights disagree about a parameter."""


class UnsupportedByRuntime(PlanError, code="unsupported-by-runtime"):
    """The runtime's execution provider has no kernel for what the package would hold."""


class IllegalParallelism(PlanError, code="illegal-tp"):
    """The model cannot be cut into that many ranks."""


class PackageError(WaybillError):
    """A package cannot be written, opened or proven."""


class TargetExists(PackageError, code="target-exists"):
    """There is already something where a package or a report would go.

    `--overwrite` replaces a package by a package and a report by a report, and nothing else.
    """


class TargetBusy(PackageError, code="target-busy"):
    """Another export is writing to the same target.

    Of a process that has ended nothing stays locked.
    """


class CannotWrite(PackageError, code="cannot-write"):
    """A package or a report cannot be written: no space, no permission, no such folder, or a failing disk.

    Nothing is left behind.
    """


class CannotLink(PackageError, code="cannot-link"):
    """The package cannot refer to the checkpoint's own bytes."""


class UnboundPackage(PackageError, code="unbound-package"):
    """A package built without weights was to be saved."""


class BadPackage(PackageError, code="bad-package"):
    """There is no package, a part of it is missing or malformed, or it does not run on this machine."""


class PackageMismatch(PackageError, code="package-mismatch"):
    """A package is not what its waybill.json, or the checkpoint it was made from, says."""


class MissingRuntime(PackageError, code="missing-runtime"):
    """What only some commands need is not installed: ONNX Runtime, Pillow for pictures, soundfile for sound."""


class RunError(WaybillError):
    """Found while bytes move or tokens are made."""


class NonFiniteWeight(RunError, code="non-finite-weight"):
    """A weight holds NaN or infinity (checked on request)."""


class ZeroPointMismatch(RunError, code="zero-point-mismatch"):
    """A weight that the metadata calls symmetric is not."""


class BadScales(RunError, code="bad-scales"):
    """The scales of a packed weight are not finite, or those of a whole group are zero."""


class InexactScales(RunError, code="inexact-scales"):
    """A scale of a packed weight is not a number of the dtype it is wanted in."""


class CastOverflow(RunError, code="cast-overflow"):
    """A finite value became infinite in the requested dtype."""


class NoTokenizer(RunError, code="no-tokenizer"):
    """There is no tokenizer.json to turn text into tokens, or the tokenizer inside a GGUF file is not one that is read.

    Those with byte-level merges are, cut in a published way.
    """


class BadTemplate(RunError, code="bad-template"):
    """The chat template is missing, fails, or exceeds its bounds."""


class BadRequest(RunError, code="bad-request"):
    """The request itself cannot be served: an empty prompt, unknown tokens, more positions than the model has."""


class BadOption(RunError, code="bad-option"):
    """An option has a value that means nothing: wrong usage."""

    exit_code: ClassVar[int] = 2


class OtherRankFailed(RunError, code="other-rank-failed"):
    """Another tensor-parallel rank refused to load its share, or ended; it is named.

    Of several that ended one after the other, the first to end is named.
    """

    speaks = True


class DeviceUnavailable(RunError, code="device-unavailable"):
    """The requested device is not on this machine."""

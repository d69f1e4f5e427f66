"""Every refusal, as one tree. The gate collects problems and raises them together, before a byte moves.

WaybillError
├── Refused                 several problems at once; `.problems` holds them
├── CheckpointError         what lies on disk
│   ├── NotACheckpoint      BadJson            PathEscape
│   ├── NoSafetensors       NotSafetensors     BadHeader
│   ├── WrongLength         MissingShard       BadIndex
│   └── DuplicateTensor     MissingTensor      FileChanged
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
│   ├── TargetExists        CannotWrite        CannotLink
│   └── UnboundPackage
└── RunError                found while bytes move or tokens are made
    ├── NonFiniteWeight     ZeroPointMismatch  BadScales         CastOverflow
    ├── InexactScales
    ├── NoTokenizer         BadTemplate        BadRequest        DeviceUnavailable
    └── BadOption           OtherRankFailed
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar


class WaybillError(Exception):
    """A broken promise that answers five questions: what, where, expected, found, fix."""

    code: ClassVar[str] = "error"

    def __init__(self, what: str, *, where: str = "", expected: str = "", found: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.expected = expected
        self.found = found
        self.fix = fix

    def __str__(self) -> str:
        rows = (("where", self.where), ("expected", self.expected), ("found", self.found), ("fix", self.fix))
        lines = [f"{self.what} [{self.code}]", *(f"  {k:<9}{v}" for k, v in rows if v)]
        return "\n".join(map(printable, lines))

    def __reduce__(self) -> tuple[object, ...]:
        # Built by keyword, it would otherwise not survive the trip from another process.
        return _rebuild, (type(self), self.what, self.where, self.expected, self.found, self.fix)

    def as_dict(self) -> dict[str, str]:
        """The JSON form: code, what, where, expected, found, fix."""
        return {
            "code": self.code,
            "what": self.what,
            "where": self.where,
            "expected": self.expected,
            "found": self.found,
            "fix": self.fix,
        }


def printable(text: str) -> str:
    """The text with control characters escaped: names come from strangers, and terminals obey what they print."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def some(names: Sequence[str], most: int = 4) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _rebuild(kind: type[WaybillError], what: str, where: str, expected: str, found: str, fix: str) -> WaybillError:
    return kind(what, where=where, expected=expected, found=found, fix=fix)


class Refused(WaybillError):
    """All problems of one checkpoint, found together."""

    code = "refused"

    def __init__(self, problems: Iterable[WaybillError]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        super().__init__(f"refused: {count} problem{'s' if count != 1 else ''}")

    def __str__(self) -> str:
        return "\n".join([self.what, *(str(problem) for problem in self.problems)])

    def __reduce__(self) -> tuple[object, ...]:
        return Refused, (self.problems,)


class CheckpointError(WaybillError):
    """What lies on disk is not a whole checkpoint."""


class NotACheckpoint(CheckpointError):
    """The path is not a folder with a config.json."""

    code = "not-a-checkpoint"


class BadJson(CheckpointError):
    """A JSON file cannot be read as the object it should be."""

    code = "bad-json"


class PathEscape(CheckpointError):
    """A file name leads out of the checkpoint directory."""

    code = "path-escape"


class NoSafetensors(CheckpointError):
    """There are no safetensors weights here, possibly another format."""

    code = "no-safetensors"


class NotSafetensors(CheckpointError):
    """A file named .safetensors holds something else."""

    code = "not-safetensors"


class BadHeader(CheckpointError):
    """A safetensors header breaks one of the format's promises."""

    code = "bad-header"


class WrongLength(CheckpointError):
    """A file is shorter or longer than its header says."""

    code = "wrong-length"


class MissingShard(CheckpointError):
    """The index names files that are not on disk."""

    code = "missing-shard"


class BadIndex(CheckpointError):
    """The index file is not a map from tensor names to file names."""

    code = "bad-index"


class DuplicateTensor(CheckpointError):
    """Two files hold a tensor of the same name."""

    code = "duplicate-tensor"


class MissingTensor(CheckpointError):
    """The index promises tensors that no file holds."""

    code = "missing-tensor"


class FileChanged(CheckpointError):
    """A file changed, shrank or failed between reading its header and reading its weights."""

    code = "file-changed"


class ConfigError(WaybillError):
    """config.json does not describe a model this library can build."""


class BadConfig(ConfigError):
    """A field is missing, of the wrong type, or out of range."""

    code = "bad-config"


class ConfigConflict(ConfigError):
    """Two places state the same fact differently."""

    code = "config-conflict"


class UnsupportedArchitecture(ConfigError):
    """No table knows this architecture."""

    code = "unsupported-architecture"


class UnsupportedFeature(ConfigError):
    """The configuration asks for arithmetic that is not implemented."""

    code = "unsupported-feature"


class UnsupportedRope(ConfigError):
    """The rotary embedding is of a kind that is not implemented."""

    code = "unsupported-rope"


class UnsupportedQuantization(ConfigError):
    """The checkpoint is packed in a format this version does not read."""

    code = "unsupported-quantization"


class BadPattern(ConfigError):
    """A pattern of the quantization metadata cannot be compiled."""

    code = "bad-pattern"


class UnresolvedComponent(ConfigError):
    """A component is asked for that the model does not declare, or declares in part."""

    code = "unresolved-component"


class ActOrder(ConfigError):
    """The groups of a packed weight are permuted (desc_act), which is not supported."""

    code = "act-order"


class PlanError(WaybillError):
    """Headers and target do not add up."""


class MissingWeight(PlanError):
    """A parameter of the model has no tensor in the checkpoint."""

    code = "missing-weight"


class MissingHead(PlanError):
    """The config says untied, and the file has no output head."""

    code = "missing-head"


class IncompleteMerge(PlanError):
    """Some members of a merged parameter are there, not all."""

    code = "incomplete-merge"


class UnclaimedWeight(PlanError):
    """A tensor in the checkpoint has no place in the model."""

    code = "unclaimed-weight"


class ClaimedTwice(PlanError):
    """Two tensors want the same place."""

    code = "claimed-twice"


class PrefixDrift(PlanError):
    """Every name carries a prefix the architecture does not use."""

    code = "prefix-drift"


class ShapeMismatch(PlanError):
    """A tensor's shape is not what the config implies."""

    code = "shape-mismatch"


class VocabMismatch(ShapeMismatch):
    """The embedding or head has another number of rows than vocab_size."""

    code = "vocab-mismatch"


class DtypeMismatch(PlanError):
    """A parameter needs float numbers, and the tensor holds something else."""

    code = "dtype-mismatch"


class IncompleteWeight(PlanError):
    """A packed weight lacks one of its sidecars."""

    code = "incomplete-weight"


class PackingMismatch(PlanError):
    """Sidecars on disk and quantization metadata contradict each other."""

    code = "packing-mismatch"


class ExpertMismatch(PlanError):
    """Experts are missing, or there are more than the config says."""

    code = "expert-mismatch"


class UnboundParameter(PlanError):
    """An emitted graph and the plan for its weights disagree about a parameter."""

    code = "unbound-parameter"


class UnsupportedByRuntime(PlanError):
    """The runtime's execution provider has no kernel for what the package would hold."""

    code = "unsupported-by-runtime"


class IllegalParallelism(PlanError):
    """The model cannot be cut into that many ranks."""

    code = "illegal-tp"


class PackageError(WaybillError):
    """A package cannot be written, opened or proven."""


class TargetExists(PackageError):
    """There is already something where the package would go."""

    code = "target-exists"


class CannotWrite(PackageError):
    """The package cannot be written: no space, no permission, or a failing disk."""

    code = "cannot-write"


class CannotLink(PackageError):
    """The package cannot refer to the checkpoint's own bytes."""

    code = "cannot-link"


class UnboundPackage(PackageError):
    """A package built without weights was to be saved."""

    code = "unbound-package"


class RunError(WaybillError):
    """Found while bytes move or tokens are made."""


class NonFiniteWeight(RunError):
    """A weight holds NaN or infinity (checked on request)."""

    code = "non-finite-weight"


class ZeroPointMismatch(RunError):
    """A weight that the metadata calls symmetric is not."""

    code = "zero-point-mismatch"


class BadScales(RunError):
    """The scales of a packed weight are not finite, or those of a whole group are zero."""

    code = "bad-scales"


class InexactScales(RunError):
    """A scale of a packed weight is not a number of the dtype it is wanted in."""

    code = "inexact-scales"


class CastOverflow(RunError):
    """A finite value became infinite in the requested dtype."""

    code = "cast-overflow"


class NoTokenizer(RunError):
    """There is no tokenizer.json to turn text into tokens."""

    code = "no-tokenizer"


class BadTemplate(RunError):
    """The chat template is missing, fails, or exceeds its bounds."""

    code = "bad-template"


class BadRequest(RunError):
    """The request itself cannot be served: an empty prompt, unknown tokens, more positions than the model has."""

    code = "bad-request"


class BadOption(RunError):
    """An option has a value that means nothing: wrong usage, exit code 2."""

    code = "bad-option"


class OtherRankFailed(RunError):
    """Another tensor-parallel rank could not load its share; that rank says why."""

    code = "other-rank-failed"


class DeviceUnavailable(RunError):
    """The requested device is not on this machine."""

    code = "device-unavailable"

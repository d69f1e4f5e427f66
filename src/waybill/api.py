"""The calls most users need: open, plan, load; and records, for tools."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from waybill.checkpoint import Checkpoint, RangeReader, read_checkpoint
from waybill.codecs.grouping import group_records, split_role
from waybill.config.model import DTYPE_TAGS
from waybill.config.quantization import QuantizationConfig
from waybill.errors import BadOption, Refused
from waybill.families import family_of
from waybill.plan import Plan, make_plan
from waybill.plan.agreement import widening
from waybill.plan.collection import uncollected
from waybill.plan.target import Target
from waybill.weights import WeightRecord

if TYPE_CHECKING:
    from waybill.engine.models.decoder import CausalLM
    from waybill.onnx.package import ModelPackage
    from waybill.onnx.verify.origin import Origin
    from waybill.onnx.verify.report import Report
    from waybill.weights.dtypes import Array


def open(path: str | Path, *, dequantize: bool = False) -> Checkpoint:
    """Describe a checkpoint from headers and config files; no weight byte is read, and of a hub's none is fetched.

    Args:
        path: a folder with config.json and safetensors, or a GGUF file; or a text that is no path here: ORG/NAME,
            ORG/NAME@REVISION or ORG/NAME/FILE.gguf on Hugging Face. What later reads weights downloads the files it
            needs, through huggingface_hub's cache.
        dequantize: blocks of a GGUF file that have minimums, or a table of values, are read as the floats they mean.

    Raises:
        NotACheckpoint: there is no such file or folder, or the folder has no config.json.
        HubError: the hub does not give what is needed.
        Refused: with every problem of its files.
    """
    checkpoint = read_checkpoint(path, dequantize=dequantize)
    if checkpoint.problems:
        raise Refused(checkpoint.problems)
    return checkpoint


def plan(
    checkpoint: Checkpoint | str | Path,
    target: str = "torch",
    *,
    tp: int = 1,
    rank: int = 0,
    dtype: str | None = None,
    ep: str = "cpu",
    link: bool = False,
    widen_mxfp4: bool = False,
) -> Plan:
    """Write the waybill: one binding per parameter of the target, totals, and `problems`, from headers alone.

    Args:
        checkpoint: an opened checkpoint, or what `open` takes.
        target: what to plan for, "torch" or "onnx".
        tp: tensor-parallel ranks.
        rank: which of them this plan is for.
        dtype: "float32", "float16" or "bfloat16"; by default what the config says, and float32 for ONNX on a CPU.
        ep: for "onnx", what will run it: "cpu" or "cuda".
        link: for "onnx", keep weights apart that lie apart, so that a package can refer to the checkpoint's files.
        widen_mxfp4: for "onnx", make experts that are 4-bit floats 8-bit integers of the same values, twice as large.

    Raises:
        BadOption: an unknown target or dtype, or a rank outside the group.
    """
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = read_checkpoint(checkpoint)
    if not 0 <= rank < tp:
        raise _bad_option(
            "the rank is outside the group",
            f"0 to {tp - 1}" if tp > 0 else "tp of at least 1",
            f"rank {rank} of {tp}",
        )
    tag = dtype_tag(dtype) if dtype is not None else None
    if target == "onnx" and tag is None and ep == "cpu":
        tag = "F32"  # 16-bit floats make nothing faster there
    if target == "onnx" and tp > 1:
        raise _bad_option("an ONNX package is not cut into ranks", "tp 1", f"tp {tp}")
    if target == "torch" and (link or ep != "cpu" or widen_mxfp4):
        found = "link" if link else f"ep {ep}" if ep != "cpu" else "widen_mxfp4"
        raise _bad_option("the engine has no execution provider and writes no package", "target onnx", found)
    with uncollected():
        family = family_of(checkpoint.config)
        chosen = _target(target, ep, link, widen_mxfp4)
        bill = make_plan(checkpoint, target=chosen, family=family, tp=tp, rank=rank, dtype=tag)
    return replace(bill, notices=(*bill.notices, *widening(bill))) if widen_mxfp4 else bill


def records(checkpoint: Checkpoint | str | Path) -> Iterator[WeightRecord]:
    """Every logical weight of a checkpoint, component by component, lazily: no weight byte is read.

    Each is as it is stored, under its stored name; rows of a GGUF file are put in order when a target is planned for.

    Raises:
        Refused: a file is broken, the metadata contradicts itself or the tensors, or a packed weight is not whole.
    """
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = open(checkpoint)
    problems = list(checkpoint.problems)
    found = group_records(checkpoint, family_of(checkpoint.config).policy(checkpoint, problems), problems)
    if problems:
        raise Refused(problems)
    yield from found


def dequantize(record: WeightRecord) -> Array:
    """A record's values as a float32 array, for tests and tools. No loader calls it: packed weights stay packed.

    A value is float32(code - zero) · float32(scale), code · scale + minimum, what a codebook says of a code times its
    scale, or the float weight itself.
    """
    from waybill.plan.boxes import dequantized

    origin = record.origin.fetched({record.origin.tensors[name].file for name in record.tensors})
    with RangeReader(origin) as reader:
        return dequantized(record.storage, reader)


def load(
    path: Checkpoint | str | Path,
    *,
    dtype: str | None = None,
    device: str = "cpu",
    check_finite: bool = False,
) -> CausalLM:
    """Load a checkpoint into the PyTorch engine; after `waybill.engine.join_group`, this rank's share of it.

    Args:
        path: an opened checkpoint, a folder, or a GGUF file.
        dtype: "float32", "float16" or "bfloat16"; by default what the config says.
        device: "cpu", "cuda" (this rank's GPU) or "cuda:N".
        check_finite: refuse weights that hold NaN or infinity.

    Raises:
        BadOption: an unknown dtype.
        DeviceUnavailable: the device is not on this machine.
        Refused: the plan does not add up; nothing was read.
        WaybillError: a file changed or a value did not fit while bytes moved.
    """
    with uncollected():  # or importing, after torch, sets off a look at all that torch has made
        from waybill.engine.load import load_model

        return load_model(path, dtype=dtype, device=device, check_finite=check_finite)


def build(
    path: Checkpoint | str | Path,
    *,
    load_weights: bool = True,
    dtype: str | None = None,
    ep: str = "cpu",
    exact: bool = False,
    logits: str = "last",
    link: bool = False,
    widen_mxfp4: bool = False,
    bring: Callable[[Plan], Plan] = Plan.fetched,
) -> ModelPackage:
    """A checkpoint as an ONNX package: the graph now, the weights when it is saved.

    Args:
        path: an opened checkpoint, or what `open` takes.
        load_weights: without them the package is a skeleton, whose `save` is refused unless asked for.
        dtype: of activations and float weights; float32 on a CPU unless told.
        ep: what will run it, "cpu" or "cuda".
        exact: packed products accumulate in float, instead of rounding activations to 8 bits as fast kernels do.
        logits: "last" for each request's last position, "all" for scoring.
        link: the package will be saved with `link=True`.
        widen_mxfp4: make experts that are 4-bit floats 8-bit integers of the same values, twice as large.
        bring: how the files of a clean plan come from a hub to this disk; by default nothing shows it.

    Raises:
        BadOption: an unknown option.
        HubError: the hub does not give what is needed.
        MissingRuntime: what `waybill[onnx]` installs is not there.
        Refused: the plan does not add up, or the chosen provider could not run the result; nothing was read.
    """
    from waybill.onnx import require

    require("onnx_ir", "blake3")
    from waybill.onnx.component import build_components
    from waybill.onnx.options import Options
    from waybill.onnx.package import ModelPackage

    if logits not in ("last", "all"):
        raise _bad_option("unknown choice of logits", "last | all", repr(logits))
    bill = plan(path, "onnx", dtype=dtype, ep=ep, link=link, widen_mxfp4=widen_mxfp4)
    options = Options(ep=ep, exact=exact, all_logits=logits == "all")
    bill.require_clean()
    bill = bring(bill) if load_weights else bill.fetched(files=())
    return ModelPackage(build_components(bill, options, load_weights=load_weights))


def verify(
    package: str | Path,
    checkpoint: Checkpoint | str | Path | None = None,
    *,
    progress: Callable[[int], None] = lambda _: None,
) -> Report:
    """Prove an exported package: its parts agree, every digest is right, and it runs a prefill and a decode step.

    Args:
        package: the folder that was exported.
        checkpoint: what it was made from; every initializer is then compared with it, value by value, by a decoder of
            its own.
        progress: told of bytes that were read.

    Returns:
        What was proven. `problems` holds everything that is wrong with the package; `require_clean` raises them.

    Raises:
        BadPackage: there is no package, or its waybill.json is malformed.
        MissingRuntime: onnxruntime is not installed.
        NotACheckpoint, Refused: the checkpoint itself cannot be read.
    """
    from waybill.onnx import require

    require("onnxruntime", "onnx_ir", "blake3")
    from waybill.onnx.verify.report import verify_package

    if isinstance(checkpoint, (str, Path)):
        checkpoint = open(checkpoint)
    return verify_package(package, None if checkpoint is None else _origin(checkpoint), progress)


def _origin(checkpoint: Checkpoint) -> Origin:
    """What a prover must know of a checkpoint: where its tensors lie, how they are packed, the angles of its rope.

    And what its files say of running it.
    """
    from waybill.onnx.genai import model_facts
    from waybill.onnx.verify.decoding import StoredTensors
    from waybill.onnx.verify.origin import Origin

    checkpoint = checkpoint.fetched(checkpoint.files)
    family, problems = family_of(checkpoint.config), list(checkpoint.problems)
    policy = family.policy(checkpoint, problems)
    config, found, _ = family.read(checkpoint.config)
    if problems := problems + found:
        raise Refused(problems)
    runtime = policy.naming.runtime
    weights = (split[0] if (split := split_role(name)) else name for name in checkpoint.tensors)
    spelled = {runtime(weight): weight for weight in weights}

    def packed(weight: str) -> QuantizationConfig | None:
        return policy.of(spelled.get(weight, weight).removesuffix(".weight"))

    stored = StoredTensors(checkpoint.root, {runtime(name): tensor for name, tensor in checkpoint.tensors.items()})
    text = config.text if config is not None else None
    facts = model_facts(config, checkpoint) if config is not None else {}
    paired = family.paired_rows(checkpoint.config, config) if config is not None else lambda _: 0
    return Origin(stored, packed, text.rotary_config if text is not None else None, facts, paired)


def dtype_tag(name: str) -> str:
    """The safetensors tag of a float dtype's name: "bfloat16" -> "BF16"."""
    tag = DTYPE_TAGS.get(name.lower().removeprefix("torch."))
    if tag is None:
        raise _bad_option("unknown dtype", "float32 | float16 | bfloat16", repr(name))
    return tag


def _target(name: str, ep: str, link: bool, widen_mxfp4: bool) -> Target:
    if name == "torch":
        from waybill.engine.target import TORCH

        return TORCH
    if name != "onnx":
        raise _bad_option("unknown target", "torch | onnx", repr(name))
    from waybill.onnx.providers import PROVIDERS
    from waybill.onnx.target import onnx_target

    if ep not in PROVIDERS:
        raise _bad_option("unknown execution provider", " | ".join(PROVIDERS), repr(ep))
    return onnx_target(ep, link=link, widen_mxfp4=widen_mxfp4)


def _bad_option(what: str, expected: str, found: str) -> BadOption:
    return BadOption(what, expected=expected, found=found, fix="choose one of the expected values")

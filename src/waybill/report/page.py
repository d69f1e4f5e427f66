"""The pages: facts of an overview or a plan, put into the one template.

Names and patterns come from strangers. Everything that is shown is escaped and bounded here, and the page forbids
itself scripts and the network.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from waybill.errors import printable, some
from waybill.overview import Report
from waybill.plan import Binding, Plan
from waybill.plan.fold import Row, fold
from waybill.plan.parameter import Packing
from waybill.report import chart, model
from waybill.report.precision import packed_as, stored_as
from waybill.report.treemap import Item, treemap
from waybill.report.write import MARKER
from waybill.weights.ranges import reads

Size = Callable[[float], str]
LONGEST = 240
"""Characters of a text that are shown."""
MOST_ROWS = 2000
"""Parameters that a bill lists one by one; the others are in the totals of their group."""
REQUESTS = (1, 2, 4, 8)
"""At once: what the chart of the cache compares."""
RANKS = 8
"""Numbers of ranks that are compared, at most."""
SHAPES = {"wide": (960, 400), "narrow": (380, 520)}
"""Width and height of a treemap on a screen and on a phone."""


class Rank(NamedTuple):
    """What one of several ranks holds: its weights, and the cache of one request at full length."""

    tp: int
    weights: int
    cache: int


class Use(NamedTuple):
    """Bytes, and what they go to or come from."""

    name: str
    nbytes: int


class Group(NamedTuple):
    """A row of the bill, and as many of its parameters as there is room for, with the shards each comes from."""

    row: Row
    bindings: list[tuple[Binding, list[Use]]]


def inspect_page(report: Report, size: Size) -> str:
    """What `inspect` shows of a checkpoint, to look at."""
    bill, checkpoint = report.bill, report.checkpoint
    weights = model.stored_weights(bill)
    strips, unlisted_stacks, outside = model.strips(weights)
    text = bill.config.text if bill.config else None
    per_token, context = report.kv_cache_bytes_per_token, text.context_length if text else 0
    stats = {
        "parameters": _short(bill.parameters) if bill.parameters else "not counted",
        "stored": size(checkpoint.nbytes),
        "bits a weight": f"{8 * checkpoint.nbytes / bill.parameters:.3g}" if bill.parameters else "not known",
        "stored tensors": f"{len(checkpoint.tensors):,}",
        "shard" if len(checkpoint.shards) == 1 else "shards": f"{len(checkpoint.shards):,}",
        "tokens of context": f"{context:,}" if context else "none stated",
    }
    ranks = [_rank(report, tp, context) for tp in report.legal_tp[:RANKS]] if bill.specs else []
    weight_bytes = ranks[0].weights if ranks else checkpoint.nbytes
    return _page(
        bill,
        size,
        dict(model.items(weights)),
        command="inspect",
        stats=stats,
        rows=sorted(_joined(report.rows(size)), key=lambda row: len(row[1]) > 1),
        components=report.components,
        strips=strips,
        unlisted_stacks=unlisted_stacks,
        outside=outside,
        vectors=sum(weight.nbytes for weight in weights if not weight.is_matrix),
        quantization=report.quantization,
        ranks=ranks,
        unlisted_ranks=len(report.legal_tp) - len(ranks),
        context=context,
        cache=chart.growth([(f"{n} request{'s' * (n > 1)}", n * per_token) for n in REQUESTS], context, weight_bytes,
                           size) if per_token and context else None,
        per_token=per_token,
        weight_bytes=weight_bytes,
    )  # fmt: skip


def plan_page(bill: Plan, facts: Mapping[str, Any], size: Size) -> str:
    """The bill of a load, to look at; `facts` are what only a package has, in words: free disk, providers' verdicts."""
    rows = sorted(fold(bill.bindings, full=False), key=lambda row: -row.bytes_read)
    room, groups = MOST_ROWS, list[Group]()
    parts: dict[str, Counter[str]] = {}
    for row in rows:
        sources = [(binding, _by_shard(binding)) for binding in row.bindings]
        for shard, nbytes in ((shard, nbytes) for _, shards in sources for shard, nbytes in shards.items()):
            parts.setdefault(shard, Counter())[row.name] += nbytes
        groups.append(Group(row, [(binding, _uses(shards)) for binding, shards in sources[:room]]))
        room -= len(groups[-1].bindings)
    reasons: dict[str, list[str]] = {}
    for name, reason in bill.ignored.items():
        reasons.setdefault(reason, []).append(name)
    memory = {"stored": bill.checkpoint.nbytes, "read": bill.bytes_read, "result": bill.result_bytes,
              "peak of host memory": bill.peak_bytes}  # fmt: skip
    stats = {
        "read": size(bill.bytes_read),
        "result": size(bill.result_bytes),
        "peak": size(bill.peak_bytes),
        "parameters": f"{len(bill.bindings):,}",
        f"of {len(bill.checkpoint.tensors):,} tensors used": f"{bill.consumed:,}",
        "computed in": bill.dtype,
    }
    return _page(
        bill,
        size,
        {"": list(_made(bill, rows))},
        command="plan",
        stats=stats if bill.bindings else {},
        groups=groups,
        shards=[(shard, _uses(parts.get(shard.name, Counter()))) for shard in bill.checkpoint.shards],
        memory=memory if bill.bindings else {},
        facts=facts,
        dropped=reasons,
        summary=bill.summary(),
    )


def _page(bill: Plan, size: Size, items: Mapping[str, list[Item]], *, command: str, **shown: Any) -> str:
    """The template with what both pages have."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.filters |= {"size": size, "digest": _digest, "fit": _fit, "some": some}
    used = {item.precision for group in items.values() for item in group}
    page = environment.get_template("page.html.j2").render(
        command=command,
        bill=bill,
        name=bill.checkpoint.root.resolve().name,
        architecture=bill.config.architectures[0] if bill.config else "unknown architecture",
        items=items,
        maps={shape: treemap(items.items(), *sides) for shape, sides in SHAPES.items()},
        legend=sorted(used),
        version=version("waybill"),
        **shown,
    )
    return f"{MARKER}\n{page}\n"


def _rank(report: Report, tp: int, context: int) -> Rank:
    text = report.bill.config.text if report.bill.config else None
    heads = text.num_kv_heads if text else 1
    cache = report.kv_cache_bytes_per_token * context // heads * max(heads // tp, 1)
    return Rank(tp, model.rank_bytes(report.bill, tp), cache)


def _made(bill: Plan, rows: Iterable[Row]) -> Iterator[Item]:
    """What a treemap shows of the finished parameters: the parts of a packed one together, a tied head once."""
    packings = {spec.name.removesuffix(".weight"): spec.packing for spec in bill.specs}
    made: dict[tuple[str, Packing | None, str], list[Row]] = {}
    for row in (row for row in rows if row.bindings[0].tied_to is None):
        first = row.bindings[0]
        packing = None if first.role == "weight" else packings.get(first.target.rpartition(".")[0])
        name = row.name.removesuffix(f".{first.role}").rpartition("}.")[2]
        made.setdefault((name, packing, "" if packing else first.dtype), []).append(row)
    for (name, packing, dtype), parts in made.items():
        kind = packed_as(packing) if packing else stored_as(dtype)
        nbytes = sum(binding.nbytes for row in parts for binding in row.bindings)
        yield Item(name, kind, packing.form if packing else kind.name, nbytes, max(len(row.bindings) for row in parts))


def _by_shard(binding: Binding) -> Counter[str]:
    total: Counter[str] = Counter()
    for file, nbytes in () if binding.shares else reads(binding.value):
        total[file] += nbytes
    return total


def _uses(total: Counter[str]) -> list[Use]:
    return [Use(name, nbytes) for name, nbytes in total.most_common() if nbytes]


def _joined(rows: Iterable[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """Rows whose label is empty belong to the one before; what has a section of its own is left out."""
    joined: list[tuple[str, list[str]]] = []
    for label, value in rows:
        if label:
            joined.append((label, []))
        joined[-1][1].append(value)
    return [row for row in joined if row[0] not in ("packed", "components")]


def _short(number: int) -> str:
    """A large count in three digits: 135 M."""
    for unit, one in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= one:
            return f"{number / one:.3g} {unit}"
    return str(number)


def _fit(name: str, room: int, count: str = "") -> str:
    """A name and a number, or its last segment, or that without the number, or what there is room for of it."""
    last = name.rpartition(".")[2] or name
    fitting = (text for text in (name + count, last + count, last) if len(text) <= room)
    return next(fitting, f"{last[: room - 1]}…" if room > 2 else "")


def _shown(value: object) -> object:
    """Text from strangers: control characters visible, and no longer than what a page can show."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    text = value if len(value) <= LONGEST else f"{value[: LONGEST - 60]} … {value[-50:]}"
    return printable(text)


def _digest(style: str) -> str:
    """What a policy calls the one style it allows."""
    return "sha256-" + base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()

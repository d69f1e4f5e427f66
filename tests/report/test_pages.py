"""Reports: what they show is what the overview and the plan say, in a page that is whole, inert and accessible."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import waybill
from checkpoints import Recipe, llama, qwen3_moe
from floating import Blocks, pack_fp8, pack_mxfp4
from packing import Scheme, pack
from reports import Element, mixed, read
from waybill.checkpoint import read_checkpoint
from waybill.cli.render import size
from waybill.overview import Report, describe
from waybill.plan import Plan
from waybill.report import model
from waybill.report.page import inspect_page, plan_page
from waybill.report.precision import stored_as

EVIL = "model.layers.1.<script>alert(1)</script>'\"><img src=//evil.example/x>\u202e\x1b.weight"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return describe(read_checkpoint(mixed(tmp_path_factory.mktemp("report") / "mixed")))


@pytest.fixture(scope="module")
def page(report: Report) -> Element:
    return read(inspect_page(report, size))


def bill_page(bill: Plan) -> Element:
    return read(plan_page(bill, {}, size))


def hostile(folder: Path) -> Path:
    recipe = llama(np.float32)
    recipe.tensors[EVIL] = np.zeros((4, 4), np.float32)
    recipe.config["quantization_config"] = {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True,
        "modules_in_block_to_quantize": [["<script>alert(2)</script>", "\"onload='x'"]],
    }  # fmt: skip
    recipe.config["architectures"] = ["</title><script>alert(3)</script>"]
    return recipe.write(folder / "<b>bold & bad")


def pages(report: Report, folder: Path) -> dict[str, Element]:
    evil = hostile(folder)
    return {
        "inspect": read(inspect_page(report, size)),
        "plan": bill_page(report.bill),
        "inspect, refused": read(inspect_page(describe(read_checkpoint(evil)), size)),
        "plan, refused": bill_page(waybill.plan(evil)),
        "plan for onnx": read(plan_page(waybill.plan(report.checkpoint, "onnx"), {"free disk": "1 GB"}, size)),
    }


def test_every_page_is_whole_and_says_everything_in_words_too(report: Report, tmp_path: Path) -> None:
    for title, page in pages(report, tmp_path).items():
        ids = [element.attributes["id"] for element in page.all() if "id" in element.attributes]
        assert len(set(ids)) == len(ids), title
        links = [link.attributes["href"] for link in page.all("a")]
        assert {link.removeprefix("#") for link in links} <= set(ids), title
        for drawing in page.all("svg"):
            assert drawing.attributes.get("aria-hidden") == "true" or (
                drawing.attributes.get("role") == "img" and drawing.attributes["aria-label"]
            ), title
        scrolling = [e for e in page.all() if e.attributes.get("class") == "box"]
        assert all(e.attributes["tabindex"] == "0" and e.attributes["aria-label"] for e in scrolling), title
        assert all(control.attributes["id"] for control in page.all("input"))
        assert len(list(page.all("h1"))) == len(list(page.all("main"))) == 1


def test_every_page_forbids_the_network_and_scripts_and_uses_neither(report: Report, tmp_path: Path) -> None:
    for title, page in pages(report, tmp_path).items():
        (policy,) = (e.attributes["content"] for e in page.all("meta") if e.attributes.get("http-equiv"))
        assert re.fullmatch(
            r"default-src 'none'; style-src 'sha256-[\w+/]+='; base-uri 'none'; form-action 'none'", policy
        )
        tags = {element.tag for element in page.all()}
        assert tags.isdisjoint({"script", "img", "link", "iframe", "object", "embed", "form", "base", "image", "use"})
        for element in page.all():
            names = element.attributes.keys()
            assert not any(name.startswith("on") for name in names) and names.isdisjoint({"src", "style"}), title
        (style,) = page.all("style")
        assert re.findall(r"@import|url\((?!#)|https?:", style.text) == []


def test_names_and_patterns_from_strangers_are_text(tmp_path: Path) -> None:
    written = inspect_page(describe(read_checkpoint(hostile(tmp_path))), size)
    assert "alert(1)" in written and "alert(3)" in written and "<script" not in written and "<img" not in written
    assert "\u202e" not in written and "\\u202e" in written and "\x1b" not in written
    page = read(written)
    assert page.one("problems").text.count("alert(1)") + page.one("layers").text.count("alert(1)") > 0
    assert next(page.all("h1")).text == "<b>bold & bad"


def test_a_name_of_any_length_and_any_number_of_them_leave_a_page_small(tmp_path: Path) -> None:
    recipe = llama(np.float32, num_hidden_layers=2)
    names = [*(f"a.{n}.{'x' * 300}{n}" for n in range(1000)), *(f"b{n % 50}.{n}.{n}y" for n in range(4000))]
    recipe.tensors |= {f"{name}.weight": np.zeros((1, 1), np.float32) for name in names}
    report = describe(read_checkpoint(recipe.write(tmp_path / "many")))
    written = inspect_page(report, size)
    assert len(written) < 1_500_000
    text = read(written).text
    assert "x" * 250 not in written and "Shown are the first 256 layers, and 60 of 1,000 names." in text
    assert "And 49 more stacks of layers." in text


def test_the_facts_are_those_of_the_overview(report: Report, page: Element) -> None:
    glance = page.one("glance")
    shown = list(zip((e.text for e in glance.all("dt")), (e.text for e in glance.all("dd")), strict=True))
    facts = [row for row in report.rows(size) if row[0] not in ("", "packed", "components")]
    assert sorted(shown) == sorted(facts)
    assert next(page.all("title")).text == "mixed: inspect"
    figures = next(e for e in page.all("dl") if e.attributes["class"] == "stats")
    labels, values = ([e.text for e in figures.all(tag)] for tag in ("dt", "dd"))
    assert dict(zip(labels, values, strict=True)) == {
        "parameters": "1.62 M",
        "stored": size(report.checkpoint.nbytes),
        "bits a weight": f"{8 * report.checkpoint.nbytes / report.bill.parameters:.3g}",
        "stored tensors": str(len(report.checkpoint.tensors)),
        "shards": "3",
        "tokens of context": "32,768",
    }


def test_the_table_below_the_areas_has_every_byte(report: Report) -> None:
    weights = model.stored_weights(report.bill)
    assert sum(weight.nbytes for weight in weights) == report.checkpoint.nbytes
    items = [item for _, group in model.items(weights) for item in group]
    assert sum(item.nbytes for item in items) == report.checkpoint.nbytes
    assert sum(item.weights for item in items) == len(weights)


def test_the_strip_says_what_each_projection_of_each_layer_is_stored_as(report: Report, page: Element) -> None:
    head, *rows = next(e for e in page.one("layers").all("table") if e.attributes.get("class") == "strip").rows
    assert head == ["matrix", *map(str, range(36))]
    cells = {name: values for name, *values in rows}
    wide = [layer in (0, 1, 17, 35) for layer in range(36)]
    assert cells["mlp.down_proj"] == ["i8" if w else "i4" for w in wide]
    assert cells["self_attn.q_proj"] == ["f32", *["i4"] * 34, "f32"]
    words = page.one("layers").text
    assert "self_attn.q_proj layer 0 float32; layers 1–34 4-bit, group 32; layer 35 float32" in words
    titles = [cell.attributes["title"] for cell in page.one("layers").all("td") if "title" in cell.attributes]
    assert "mlp.down_proj, layer 17: 8-bit, group 32" in titles


def test_every_pattern_is_counted_and_one_that_matches_nothing_is_pointed_at(report: Report, page: Element) -> None:
    rules, layout = page.one("rules"), report.quantization["decoder"]
    _, *rows = rules.rows
    assert [tuple(row[:3]) for row in rows] == [(where, p, str(hits)) for where, p, hits in layout.patterns]
    assert "1 pattern matches no module. Spelled right? lm_haed in modules_to_not_convert" in rules.text
    for form, modules in layout.groups.items():
        assert f"{len(modules)} × {form}" in rules.text


@pytest.mark.parametrize("make", [llama, qwen3_moe])
def test_memory_by_ranks_is_what_plans_for_those_ranks_say(make: Any, tmp_path: Path) -> None:
    for title, recipe in {"float": make(np.float32), "packed": pack(make(np.float32), Scheme("gptq")).packed}.items():
        report = describe(read_checkpoint(recipe.write(tmp_path / title)))
        page = read(inspect_page(report, size))
        _, *rows = page.one("memory").rows
        assert [int(row[0]) for row in rows] == report.legal_tp
        for tp in report.legal_tp:
            assert model.rank_bytes(report.bill, tp) == waybill.plan(report.checkpoint, tp=tp).result_bytes
        per_token = report.kv_cache_bytes_per_token
        assert rows[0][1:3] == [size(report.bill.result_bytes), size(256 * per_token)]


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (pack_fp8(qwen3_moe(np.float32), Blocks(16, 16)).packed, {"f8", "f32"}),
        (pack_mxfp4(qwen3_moe(np.float32, banks=True)).packed, {"mx4", "f32"}),
        (pack(llama(np.float32), Scheme("awq")).packed, {"i4", "f32"}),
        (pack(llama(np.float32), Scheme("ct_int", 8, 32)).packed, {"i8", "f32"}),
        (llama(np.float16), {"f16"}),
        (llama(), {"b16"}),
    ],
)
def test_precisions_are_told_apart_whatever_the_producer(recipe: Recipe, expected: set[str], tmp_path: Path) -> None:
    weights = model.stored_weights(describe(read_checkpoint(recipe.write(tmp_path))).bill)
    assert {weight.precision.short for weight in weights if weight.is_matrix} == expected


def test_blocks_that_are_named_by_their_bits_keep_their_name() -> None:
    kinds = [stored_as(name) for name in ("Q4_K", "Q6_K", "IQ2_XXS", "I64")]
    assert [(k.style, k.short, k.name) for k in kinds] == [
        ("i4", "q4", "Q4_K"), ("i8", "q6", "Q6_K"), ("i2", "q2", "IQ2_XXS"), ("other", "i64", "I64"),
    ]  # fmt: skip


def test_where_nothing_could_be_planned_metadata_says_how_a_weight_is_packed(tmp_path: Path) -> None:
    recipe = pack(llama(np.float32), Scheme("gptq", 8)).packed
    recipe.config["architectures"] = ["NobodyKnowsForCausalLM"]
    bill = describe(read_checkpoint(recipe.write(tmp_path))).bill
    assert bill.problems and not bill.packings
    kinds = {weight.precision.short for weight in model.stored_weights(bill) if "_proj" in weight.module}
    assert kinds == {"i8"}


def test_the_bill_has_every_parameter_and_the_bytes_it_takes_from_each_shard(report: Report) -> None:
    bill = report.bill
    page = bill_page(bill)
    rows = [row for row in page.one("parameters").rows if row[0] != "parameter"]
    assert sorted(row[0] for row in rows) == sorted(binding.target for binding in bill.bindings)
    by_name = {binding.target: binding for binding in bill.bindings}
    assert all(row[4] == size(by_name[row[0]].bytes_read) for row in rows)
    names = {tensor.name: tensor.file for tensor in bill.checkpoint.tensors.values()}
    for row in rows:
        files = {names[source] for source in by_name[row[0]].sources}
        assert files >= {shard for shard in {s.name for s in bill.checkpoint.shards} if shard in row[3]} != set()
    made = next(page.one("bytes").all("table")).rows[1:]
    assert {row[0] for row in made} >= {"model.embed_tokens", "mlp.down_proj", "self_attn.qkv_proj"}
    assert bill.summary() in page.one("memory").text
    assert [row[1] for row in page.one("memory").rows] == [
        size(n) for n in (bill.checkpoint.nbytes, bill.bytes_read, bill.result_bytes, bill.peak_bytes)
    ]
    headings = [e.text for e in page.one("shards").all("summary")]
    assert [shard.name in heading for shard, heading in zip(bill.checkpoint.shards, headings, strict=True)] == [
        True
    ] * 3


def test_what_is_dropped_is_shown_by_the_rule_that_drops_it(tmp_path: Path) -> None:
    recipe = llama()
    for layer in range(2):
        recipe.tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    bill = waybill.plan(recipe.write(tmp_path))
    (reason,) = set(bill.ignored.values())
    assert f"2 tensors: {reason}" in bill_page(bill).one("dropped").text


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
    parts = (int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_all_text_can_be_read_in_light_and_in_dark(page: Element) -> None:
    style = next(page.all("style")).text
    themes = {name: pair for name, *pair in re.findall(r"--(\w+):light-dark\((#\w+),(#\w+)\)", style)}
    for theme in (0, 1):
        for text in ("ink", "soft", "accent", "bad", "good"):
            for ground in ("page", "card"):
                assert contrast(themes[text][theme], themes[ground][theme]) >= 4.5, (text, ground, theme)
        assert contrast(themes["on"][theme], themes["accent"][theme]) >= 4.5
    fills = re.findall(r"\.(\w+)\{--fill:(#\w+);--text:(?:var\(--dark\)|(#\w+))\}", style)
    (dark,) = re.findall(r"--dark:(#\w+)", style)
    assert len(fills) == 9
    for name, fill, text in fills:
        assert contrast(fill, text or dark) >= 4.5, name
    assert "--hatch:#ffffff" in style, "lines over dark text must be light"

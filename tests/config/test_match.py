"""Patterns in quantization metadata: each producer's dialect selects the modules that the producer would."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from waybill.config.match import (
    Matcher,
    auto_round_search,
    block_members,
    compressed_targets,
    gptq_dynamic,
    module_paths,
    olive_exclusions,
    olive_overrides,
)
from waybill.errors import BadPattern

Dialect = Callable[[list[str], str], Matcher]
MODULES = {
    "A": "model.layers.1.mlp.gate",
    "B": "model.layers.1.mlp.gate_proj",
    "C": "model.layers.10.mlp.gate",
    "D": "model.layers.1.self_attn.q_proj",
}
DIALECTS: list[Dialect] = [module_paths, olive_exclusions, olive_overrides, gptq_dynamic, auto_round_search]
DIALECTS.append(compressed_targets)
MARKED: list[Dialect] = [module_paths, olive_exclusions, olive_overrides, compressed_targets]


def selected(dialect: Dialect, pattern: str) -> str:
    matcher = dialect([pattern], "here")
    return "".join(letter for letter, name in MODULES.items() if matcher.first(name) is not None)


def expression(dialect: Dialect, pattern: str) -> str:
    return f"re:{pattern}" if dialect in MARKED else pattern


@pytest.mark.parametrize(
    ("dialect", "pattern", "modules"),
    [
        (module_paths, "model.layers.1", "ABD"),
        (module_paths, "mlp.gate", ""),
        (module_paths, "model.layers.1.mlp.gate", "A"),
        (module_paths, "model.layers.1.", ""),
        (module_paths, "gate", ""),
        (module_paths, "", ""),
        (module_paths, r"re:model\.layers\.1\..*", "ABD"),
        (module_paths, r"re:model\.layers\.1", ""),
        (module_paths, r"re:.*mlp\.gate", "AC"),
        (module_paths, r"re:.*mlp\.(gate|up)_proj", "B"),
        (block_members, "mlp.gate", "AC"),
        (block_members, "gate", "AC"),
        (block_members, "p.gate", ""),
        (olive_exclusions, "model.layers.1", "ABCD"),
        (olive_exclusions, "mlp.gate", "ABC"),
        (olive_exclusions, "gate_proj", "B"),
        (olive_exclusions, r"re:.*mlp\.gate", "AC"),
        (olive_exclusions, r"re:mlp\.gate", ""),
        (olive_exclusions, "model.layers.1.*", ""),
        (olive_overrides, "model.layers.1", ""),
        (olive_overrides, "mlp.gate", ""),
        (olive_overrides, "model.layers.1.mlp.gate", "A"),
        (olive_overrides, r"re:model\.layers\.1\.mlp\..*", "AB"),
        (olive_overrides, r"re:model\.layers\.1", ""),
        (gptq_dynamic, "model.layers.1", "ABCD"),
        (gptq_dynamic, r"model\.layers\.1", "ABCD"),
        (gptq_dynamic, r"model\.layers\.1\.", "ABD"),
        (gptq_dynamic, "mlp.gate", ""),
        (gptq_dynamic, r".*mlp\.gate", "ABC"),
        (gptq_dynamic, r".*mlp\.gate$", "AC"),
        (auto_round_search, "model.layers.1", "ABCD"),
        (auto_round_search, "mlp.gate", "ABC"),
        (auto_round_search, r"mlp\.gate$", "AC"),
        (auto_round_search, r"^mlp", ""),
        (auto_round_search, r"model\.layers\.1\.", "ABD"),
        (compressed_targets, "model.layers.1", ""),
        (compressed_targets, "mlp.gate", ""),
        (compressed_targets, "model.layers.1.mlp.gate", "A"),
        (compressed_targets, r"re:model\.layers\.1", "ABCD"),
        (compressed_targets, r"re:model\.layers\.1\.", "ABD"),
        (compressed_targets, r"re:mlp\.gate", ""),
        (compressed_targets, r"re:.*mlp\.gate", "ABC"),
        (compressed_targets, r"re:.*mlp\.gate$", "AC"),
    ],
)
def test_a_pattern_selects_what_its_producer_means(dialect: Dialect, pattern: str, modules: str) -> None:
    assert selected(dialect, pattern) == modules


def test_a_head_rule_of_gptq_also_hits_what_begins_like_it() -> None:
    assert gptq_dynamic(["lm_head"], "here").first("lm_head_norm") == 0
    assert module_paths(["lm_head"], "here").first("lm_head_norm") is None


def test_a_class_name_selects_every_module_of_that_kind_and_no_path() -> None:
    matcher = compressed_targets(["Linear", "Embedding", "Conv2d"], "here")
    kinds = ("linear", "head", "embedding", "experts", "")
    selected = [[matcher.patterns[at] for at in matcher.matches("model.Linear.x", kind)] for kind in kinds]
    assert selected == [["Linear"], ["Linear"], ["Embedding"], [], []]
    assert compressed_targets(["Module"], "here").first("lm_head", "head") == 0
    assert compressed_targets(["re:Lin", "linear", "Lin"], "here").first("lm_head", "head") is None


def test_a_target_that_is_a_path_comes_before_expressions_in_order_of_their_text_and_these_before_classes() -> None:
    name = "model.layers.1.mlp.gate"
    matcher = compressed_targets(["Linear", "re:model.*", r"re:.*\.gate", name], "here")
    assert [matcher.patterns[at] for at in matcher.matches(name, "linear")] == [
        name, r"re:.*\.gate", "re:model.*", "Linear",
    ]  # fmt: skip


@pytest.mark.parametrize("dialect", [each for each in MARKED if each is not compressed_targets])
def test_literals_and_expressions_are_ordered_together_as_in_the_file(dialect: Dialect) -> None:
    name = "model.layers.1.mlp.gate"
    matcher = dialect(["re:.*other", name, r"re:.*\.gate", "x", name, "re:model.*"], "here")
    assert matcher.matches(name) == [1, 2, 4, 5]
    assert matcher.first(name) == 1
    assert dialect([r"re:.*\.gate", name], "here").first(name) == 0


@pytest.mark.parametrize("dialect", [gptq_dynamic, auto_round_search])
def test_the_first_of_several_expressions_wins(dialect: Dialect) -> None:
    matcher = dialect([r"model\.layers\.7", r"model.*gate", r"model\.layers\.1", "model"], "here")
    assert matcher.matches("model.layers.1.mlp.gate") == [1, 2, 3]
    assert matcher.first("model.layers.1.mlp.gate") == 1


@pytest.mark.parametrize("dialect", DIALECTS)
def test_no_patterns_select_nothing(dialect: Dialect) -> None:
    assert dialect([], "here").first("model.layers.1.mlp.gate") is None


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    "pattern",
    ["(", "[", "*", "(?P<n", "(?!x)y", "(?=x)x", "(?<=x)y", "(?<!x)y", r"(a)\1", "x*+", "a{2000}", "((a{30}){30}){30}"],
)
def test_a_bad_pattern_is_refused_and_quoted(dialect: Dialect, pattern: str) -> None:
    with pytest.raises(BadPattern) as refused:
        dialect(["model", expression(dialect, pattern)], "config.json: rules")
    assert refused.value.code == "bad-pattern"
    assert refused.value.where == f"config.json: rules: {pattern}"
    assert refused.value.fix


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_pattern_that_is_no_text_is_refused(dialect: Dialect) -> None:
    with pytest.raises(BadPattern):
        dialect([expression(dialect, "\ud800")], "here")  # half a character: JSON can say it, UTF-8 cannot


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_marker_makes_no_expression_of_a_literal(dialect: Dialect) -> None:
    if dialect in MARKED:
        assert dialect(["("], "here").first("a(b") == (0 if dialect is olive_exclusions else None)
    else:
        with pytest.raises(BadPattern):
            dialect(["("], "here")


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*b$", "(.*)*b$", "(a?){60}a{60}$"])
def test_an_expression_that_makes_others_backtrack_for_ever_answers(dialect: Dialect, pattern: str) -> None:
    matcher = dialect([expression(dialect, pattern)], "here")
    assert matcher.first("a" * 50_000 + "!") is None
    assert dialect([expression(dialect, "(a+)+!$")], "here").first("a" * 50_000 + "!") == 0


def steps(work: Callable[[], Any]) -> int:
    """Bytecode instructions that `work` executes in Python."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(
    "dialect", [module_paths, olive_overrides, gptq_dynamic, auto_round_search, compressed_targets]
)
def test_a_name_costs_the_same_however_many_rules_there_are(dialect: Dialect) -> None:
    few, many = ([f"model.layers.{i}.mlp.down_proj" for i in range(count)] for count in (10, 3000))
    small, large = dialect(few, "here"), dialect(many, "here")
    name = "model.layers.7.mlp.up_proj"
    assert small.first(name) is large.first(name) is None
    assert steps(lambda: large.first(name)) == steps(lambda: small.first(name)) > 0


@pytest.mark.parametrize("dialect", [module_paths, olive_overrides, gptq_dynamic, auto_round_search])
def test_3000_literal_rules_are_asked_about_40000_names(dialect: Dialect) -> None:
    layers, experts = 100, 400
    rules = [f"model.layers.{i}.mlp.experts.{j}.down_proj" for i in range(layers) for j in range(30)]
    matcher = dialect(rules, "here")
    names = [f"model.layers.{i}.mlp.experts.{j}.down_proj" for i in range(layers) for j in range(experts)]
    hits = [index for name in names if (index := matcher.first(name)) is not None]
    assert len(names) == 40_000
    assert hits == list(range(3000))

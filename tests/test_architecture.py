"""The shape of the source itself: who may import whom, what is banned and why, and that no error goes unspoken."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from scripts.catalogue import CATALOGUE, catalogue

from waybill import errors

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "waybill"
FILES = {path.relative_to(SOURCE).as_posix(): path for path in sorted(SOURCE.rglob("*.py"))}

# From bottom to top. A package may import those listed, and itself; anything else would make the arrow turn.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "checkpoint": {"errors"},
    "config": {"errors"},
    "weights": {"checkpoint"},
    "manifest": {"config", "errors"},
    "codecs": {"checkpoint", "config", "errors", "manifest", "weights"},
    "rules": set(),
    "plan": {"checkpoint", "codecs", "config", "errors", "manifest", "rules", "weights"},
    "text": {"checkpoint", "errors"},
    "media": {"checkpoint", "config", "errors"},
    "families": {"config", "errors", "manifest", "plan", "rules"},
    "engine/target": {"config", "errors", "plan"},
    "engine": {"families", "config", "engine/load", "errors", "plan", "text", "weights"},
    "engine/load": {"api", "families", "checkpoint", "config", "engine", "errors", "plan", "weights"},
    "onnx": {"families", "checkpoint", "codecs", "config", "errors", "manifest", "plan", "text", "weights"},
    "api": {
        "checkpoint",
        "codecs",
        "config",
        "engine",
        "engine/target",
        "engine/load",
        "errors",
        "onnx",
        "families",
        "plan",
        "weights",
    },
    "overview": {"api", "checkpoint", "codecs", "config", "engine/target", "errors", "families", "manifest", "plan"},
    "report": {"checkpoint", "codecs", "config", "errors", "overview", "plan", "rules", "weights"},
    "differences": set(),
    "comparison": {"api", "checkpoint", "differences", "errors", "families", "manifest", "onnx", "plan", "weights"},
    "waybill": {"api", "comparison", "errors"},
    "cli": {
        "checkpoint",
        "comparison",
        "differences",
        "engine",
        "engine/load",
        "errors",
        "media",
        "onnx",
        "overview",
        "plan",
        "report",
        "text",
        "waybill",
    },
    "__main__": {"cli"},
}
# What must wait for a call, or be for the type checker: torch or onnx_ir stands behind it, or the arrow points up.
ONLY_WHEN_CALLED = {
    ("engine", "engine/load"), ("api", "engine"), ("api", "engine/load"), ("cli", "engine"), ("cli", "engine/load"),
    ("api", "onnx"), ("cli", "onnx"), ("comparison", "onnx"),
}  # fmt: skip

NEVER = {
    "pickle": "checkpoints come from strangers",
    "marshal": "checkpoints come from strangers",
    "shelve": "unpickles",
    "transformers": "we read its files, we do not run its code",
    "safetensors": "the header is judged before a byte is trusted, by our own reader",
}
HOMELESS = {"utils", "util", "common", "helpers", "misc"}
# Values that carry the name of a model: a rope scaling type, and a kernel a packing format is named after.
ROPE_TYPE = re.compile("llama3|exllama")
MODEL_NAME = re.compile(r"llama|qwen|whisper|llava|siglip|\bt5\b|_t5|clipvision", re.IGNORECASE)
MODULE_PATH = re.compile(
    r"\b(self_attn|\w*_proj|lm_head|embed_tokens|layernorm|vision_tower|audio_tower|multi_modal_projector|language_model|"
    r"model\.layers|encoder\.\w|decoder\.\w|SelfAttention)\b"
)
KNOWS_MODELS = ("config/architectures.py", "families/", "onnx/graphs/", "media/", "text/splitting.py")
GENERIC = (
    "checkpoint/", "config/", "weights/", "manifest/", "codecs/", "rules/", "plan/", "cli/", "api.py", "comparison.py",
    "overview.py", "onnx/data.py", "onnx/gate.py", "onnx/bill.py", "onnx/component.py", "onnx/writing.py",
    "onnx/package.py", "onnx/target.py", "onnx/parts/stack", "onnx/matrix.py", "onnx/contents.py", "onnx/runtime/",
    "report/",
)  # fmt: skip


def unit_of(module: str) -> str:
    """`waybill.engine.layers.norm` -> "engine": the row of the table that a module belongs to."""
    parts = module.split(".")[1:] or ["waybill"]
    pair = "/".join(parts[:2])
    return pair if pair in MAY_IMPORT else parts[0]


def module_of(file: str) -> str:
    return ".".join(["waybill", *file.removesuffix(".py").removesuffix("__init__").strip("/").split("/")]).rstrip(".")


@cache
def tree(file: str) -> ast.Module:
    return ast.parse(FILES[file].read_text("utf-8"), file)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports(node: ast.AST, lazy: bool = False) -> Iterator[tuple[str, bool]]:
    """Every imported module, and whether that waits for a call or for the type checker."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield "." * child.level + (child.module or ""), lazy
            if child.module and not child.level:  # `from waybill.plan import diagnose` may name a module
                yield from ((f"{child.module}.{a.name}", lazy) for a in child.names if is_module(child.module, a.name))
        else:
            waits = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) or is_type_checking(child)
            yield from imports(child, lazy or waits)


def is_module(package: str, name: str) -> bool:
    path = "/".join([*package.split(".")[1:], name])
    return f"{path}.py" in FILES or f"{path}/__init__.py" in FILES


def every(file: str, kind: type[ast.AST]) -> Iterator[ast.AST]:
    return (node for node in ast.walk(tree(file)) if isinstance(node, kind))


def docstrings(file: str) -> set[ast.AST]:
    """The string nodes that are documentation: a string as a statement of its own."""
    return {node.value for node in every(file, ast.Expr) if isinstance(node, ast.Expr)}


all_files = pytest.mark.parametrize("file", FILES)


@all_files
def test_imports_point_one_way(file: str) -> None:
    here = unit_of(module_of(file))
    for module, lazy in imports(tree(file)):
        if module.split(".")[0] != "waybill":
            continue
        there = unit_of(module)
        assert there == here or there in MAY_IMPORT[here], f"{here} imports {module}"
        assert lazy or (here, there) not in ONLY_WHEN_CALLED, f"{here} imports {module} before it is called"


def test_the_table_of_imports_has_no_row_and_no_right_that_nobody_uses() -> None:
    used: dict[str, set[str]] = {unit: set() for unit in MAY_IMPORT}
    for file in FILES:
        here = unit_of(module_of(file))
        used[here] |= {unit_of(module) for module, _ in imports(tree(file)) if module.split(".")[0] == "waybill"}
    assert {here: rights - used[here] for here, rights in MAY_IMPORT.items() if rights - used[here]} == {}


def test_the_table_has_no_circle_but_the_one_that_waits_for_a_call() -> None:
    def reached(unit: str, seen: frozenset[str] = frozenset()) -> set[str]:
        below = {there for there in MAY_IMPORT[unit] if (unit, there) not in ONLY_WHEN_CALLED} - seen
        return below | {far for there in below for far in reached(there, seen | below)}

    assert [unit for unit in MAY_IMPORT if unit in reached(unit)] == []


@all_files
def test_imports_are_absolute_and_name_what_they_take(file: str) -> None:
    assert [module for module, _ in imports(tree(file)) if module.startswith(".")] == []
    names = [
        alias.name for node in every(file, ast.ImportFrom) if isinstance(node, ast.ImportFrom) for alias in node.names
    ]
    assert "*" not in names


@all_files
def test_torch_is_imported_inside_the_engine_only(file: str) -> None:
    eager = [lazy for module, lazy in imports(tree(file)) if module.split(".")[0] == "torch"]
    if file in ("engine/__init__.py", "engine/target.py"):
        assert False not in eager
    elif not file.startswith("engine/"):
        assert eager == []


@all_files
def test_onnx_is_imported_inside_its_package_only(file: str) -> None:
    heavy = {module.split(".")[0] for module, _ in imports(tree(file))} & {"onnx", "onnx_ir", "onnxruntime"}
    assert not heavy or file.startswith("onnx/")


@all_files
def test_what_runs_strangers_code_is_imported_nowhere(file: str) -> None:
    for module, _ in imports(tree(file)):
        assert module.split(".")[0] not in NEVER, f"{module}: {NEVER[module.split('.')[0]]}"
    calls = [ast.unparse(node.func) for node in every(file, ast.Call) if isinstance(node, ast.Call)]
    assert {"eval", "exec", "torch.load", "np.load", "compile", "__import__"}.isdisjoint(calls)


@all_files
def test_files_are_read_and_never_mapped(file: str) -> None:
    """Of a mapped file that is truncated the kernel tells by ending the process (SIGBUS); of a read one, in words."""
    code = re.sub(r"^import mmap$", "", ast.unparse(tree(file)), flags=re.MULTILINE)
    mapping = re.findall(r"mmap\.?\w*|memmap|mmap_mode|torch\.from_file|UntypedStorage", code)
    assert set(mapping) <= {"mmap.PAGESIZE"}


def test_inspecting_and_planning_load_neither_torch_nor_transformers() -> None:
    script = (
        "import sys, waybill, waybill.overview, waybill.cli.app, waybill.plan.fold, waybill.engine.target\n"
        "print(*({'torch', 'transformers', 'safetensors', 'onnx_ir', 'onnxruntime'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@all_files
def test_only_commands_print(file: str) -> None:
    names = [node.id for node in every(file, ast.Name) if isinstance(node, ast.Name)]
    assert file.startswith("cli/") or "print" not in names


@all_files
def test_no_assert_guards_anything(file: str) -> None:
    assert list(every(file, ast.Assert)) == []


@all_files
def test_no_except_swallows_everything(file: str) -> None:
    for node in every(file, ast.ExceptHandler):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"line {node.lineno}: a bare except"
            caught = ast.unparse(node.type)
            broad = re.search(r"\b(Base)?Exception\b", caught)
            spoken = any(
                isinstance(x, ast.Raise) or (isinstance(x, ast.Name) and x.id == node.name) for x in ast.walk(node)
            )
            assert spoken or not broad, f"line {node.lineno}: {caught} is caught and not mentioned"
            assert not all(isinstance(inner, ast.Pass) for inner in node.body), f"line {node.lineno}: silence"


@all_files
def test_a_file_has_under_four_hundred_lines_and_a_function_under_sixty(file: str) -> None:
    assert len(FILES[file].read_text("utf-8").splitlines()) < 400
    for node in ast.walk(tree(file)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert (node.end_lineno or 0) - node.lineno + 1 < 60, node.name


@all_files
def test_no_module_is_a_drawer_for_odds_and_ends(file: str) -> None:
    assert HOMELESS.isdisjoint(Path(file).with_suffix("").parts)


@all_files
def test_models_are_named_only_where_models_are_described(file: str) -> None:
    if file.startswith(KNOWS_MODELS):
        return
    prose = docstrings(file)
    words = [word for node in ast.walk(tree(file)) if node not in prose for word in names_in(node)]
    assert [word for word in words if MODEL_NAME.search(ROPE_TYPE.sub("", word))] == []


@all_files
def test_generic_code_names_no_module_of_a_model(file: str) -> None:
    if not file.startswith(GENERIC) or file == "config/architectures.py":
        return
    prose = docstrings(file)
    texts = [node.value for node in ast.walk(tree(file)) if isinstance(node, ast.Constant) and node not in prose]
    found = [text for text in texts if isinstance(text, str) and MODULE_PATH.search(text)]
    # A key of quantization metadata, and where a number that is none was found.
    assert [text for text in found if text not in ("lm_head", "quantize_lm_head")] == []


def names_in(node: ast.AST) -> Iterator[str]:
    """A node's string constant or identifiers."""
    for _, value in ast.iter_fields(node):
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str):
                yield item


def codes(kind: type[errors.WaybillError] = errors.WaybillError) -> Iterator[type[errors.WaybillError]]:
    """Every problem that can be reported: a class that states a code of its own (`Refused` only carries others)."""
    for child in kind.__subclasses__():
        if "code" in vars(child) and child is not errors.Refused:
            yield child
        yield from codes(child)


ERRORS = sorted(codes(), key=lambda error: error.code)
every_error = pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.code)


def test_every_error_has_a_code_of_its_own() -> None:
    assert len({error.code for error in ERRORS}) == len(ERRORS) > 30
    assert all(re.fullmatch("[a-z]+(-[a-z]+)*", error.code) for error in ERRORS)


@every_error
def test_every_error_is_drawn_in_the_tree_and_explained_in_its_docstring(error: type[errors.WaybillError]) -> None:
    assert re.search(rf"\b{error.__name__}\b", errors.__doc__ or "")
    assert error.__doc__ and error.__doc__.strip().endswith(".")


@every_error
def test_every_error_is_raised_somewhere(error: type[errors.WaybillError]) -> None:
    elsewhere = (
        name
        for file in FILES
        if not file.startswith("errors/")
        for node in every(file, ast.Name)
        for name in names_in(node)
    )
    assert error.__name__ in elsewhere


def test_the_catalogue_says_of_every_error_what_its_class_does() -> None:
    present = CATALOGUE.read_text("utf-8")
    assert catalogue(present) == present, "run `make catalogue`"


@every_error
def test_every_error_has_an_example_in_the_catalogue(error: type[errors.WaybillError]) -> None:
    entry = CATALOGUE.read_text("utf-8").partition(f"### {error.code}\n")[2].partition("\n#")[0]
    assert f" [{error.code}]\n" in entry


@cache
def all_tests() -> str:
    paths = (path for path in sorted((ROOT / "tests").rglob("test_*.py")) if path != Path(__file__))
    return "\n".join(path.read_text("utf-8") for path in paths)


@every_error
def test_every_error_is_asserted_by_a_test(error: type[errors.WaybillError]) -> None:
    spoken = rf"""["'`\[]{error.code}["'`\]]|raises\({error.__name__}\b"""
    assert re.search(spoken, all_tests()), f"no test asserts {error.code}"

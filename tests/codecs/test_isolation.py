"""Codecs know formats, not models: no model's name, no module path, and nothing of the layers above them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import waybill.codecs

FILES = sorted(Path(waybill.codecs.__file__).parent.glob("*.py"))
MODELS = ("llama", "qwen", "mistral", "mixtral", "gemma", "phi", "deepseek")
PATHS = ("model.layers", "self_attn", "mlp", "q_proj", "k_proj", "v_proj", "o_proj", "gate", "up_proj", "down_proj",
         "experts", "lm_head", "embed_tokens", "layernorm")  # fmt: skip


def strings(file: Path) -> set[str]:
    """Every string constant that code can see: docstrings are for people."""
    tree = ast.parse(file.read_text())
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in prose]
    return {node.value.lower() for node in constants if isinstance(node.value, str)}


def test_every_codec_file_is_looked_at() -> None:
    assert {"gptq.py", "awq.py", "olive.py", "compressed_tensors.py", "decoders.py", "words.py", "grouping.py"} <= {
        f.name for f in FILES
    }
    assert any("qweight" in text for file in FILES for text in strings(file))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_no_codec_names_a_model_or_a_module_path(file: Path) -> None:
    assert not [text for text in strings(file) if any(word in text for word in (*MODELS, *PATHS))]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_no_codec_imports_a_rule_a_plan_or_an_engine(file: Path) -> None:
    modules = {
        node.module
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("waybill")
    }
    below = ("checkpoint", "codecs", "config.gguf", "config.quantization", "errors", "manifest", "weights")
    assert not [module for module in modules if not module.removeprefix("waybill.").startswith(below)]


def test_reading_codecs_imports_no_tensor_library() -> None:
    program = "import sys, waybill.codecs.registry; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    subprocess.run([sys.executable, "-c", program], check=True)

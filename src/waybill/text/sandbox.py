"""The worker that renders one chat template: limits itself, reads a job, writes text or an error."""

from __future__ import annotations

import json
import resource
import sys
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_SECONDS = 5
MEMORY_BYTES = 512 << 20
MAX_OUTPUT = 4 << 20


class Generation(Extension):
    """`{% generation %}` marks what the assistant said; for a prompt the mark means nothing."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Keep what is between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render(job: dict[str, Any]) -> str:
    """Render with the names chat templates expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    template = environment.from_string(job["template"])
    text = template.render(messages=job["messages"], add_generation_prompt=True, **job["tokens"])
    if len(text) > MAX_OUTPUT:
        raise TemplateError(f"it rendered {len(text):,} characters")
    text.encode()  # lone surrogates are no text
    return text


def main() -> None:
    """Render within the bounds; any error of the template becomes a message."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    job = json.load(sys.stdin)
    try:
        answer = {"text": render(job)}
    except MemoryError:
        answer = {"error": "it ran out of memory"}
    except Exception as error:  # whatever a stranger's program raises is its failure, not ours
        answer = {"error": f"{type(error).__name__}: {error}"[:500]}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()

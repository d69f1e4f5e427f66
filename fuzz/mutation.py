"""Mutating JSON as a tree: most mutated bytes are no JSON at all, and would never get past the parser."""

from __future__ import annotations

import json
from copy import deepcopy
from random import Random
from typing import Any

import atheris

ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 4, 8, 16, 32, 64, 128, 4096, 1 << 31, 1 << 63, 10**30, 0.5, 1e308, -1e-308, "", "x",
    "\ud800", "\0", "..", "/etc/passwd", "re:.*", "re:(a*)*$", "F32", "I8", "BF16", [], {}, [[]], [0, 0], {"": {}},
)  # fmt: skip


def mutate_json(octets: bytes, largest: int, seed: int) -> bytes:
    """The same document with a few values replaced, moved, doubled, renamed or removed; or with other bytes."""
    random = Random(seed)
    try:
        tree = json.loads(octets)
    except (ValueError, RecursionError):
        tree = None
    if not isinstance(tree, (dict, list)) or random.random() < 0.1:
        return bytes(atheris.Mutate(octets, largest))
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        _change(tree, random)
    try:
        mutated = json.dumps(tree).encode()
    except (ValueError, RecursionError):
        return octets[:largest]
    return mutated if len(mutated) <= largest else octets[:largest]


def _change(tree: Any, random: Random) -> None:
    """Change one place inside `tree`."""
    places: list[tuple[Any, Any]] = []
    waiting = [tree]
    while waiting and len(places) < 10_000:
        node = waiting.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node))
        places += [(node, key) for key in keys]
        waiting += [node[key] for key in keys if isinstance(node[key], (dict, list))]
    if not places:
        return
    node, key = random.choice(places)
    value = node[key]
    match random.randrange(6):
        case 0:
            node[key] = deepcopy(random.choice(ODD))
        case 1:
            other, place = random.choice(places)
            node[key] = deepcopy(other[place])
        case 2 if type(value) is int:
            node[key] = value + random.choice((-1, 1, 8, -value - 1, value))
        case 2 if isinstance(value, str) and value:
            at = random.randrange(len(value))
            node[key] = (
                value[:at] + random.choice(("", "0", "1", "4", ".", "*", "|", "(", "_", value)) + value[at + 1 :]
            )
        case 3:
            del node[key]
        case 4 if isinstance(node, dict):
            node[random.choice([str(k) for _, k in places]) + random.choice(("", "x"))] = node.pop(key)
        case 5 if isinstance(node, list):
            node.insert(random.randrange(len(node) + 1), deepcopy(value))

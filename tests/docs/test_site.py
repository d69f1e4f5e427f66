"""The documentation: it builds without a warning, is complete, and asks no other host for anything."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripts.decisions import decisions

import waybill
import waybill.engine
from waybill import errors

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [path.relative_to(DOCS).with_suffix(".html") for path in sorted(DOCS.rglob("*.md"))]
FETCHED = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//[^>]*>""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]  # --quiet hides all
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def navigation(site: Path) -> str:
    return (site / "index.html").read_text("utf-8").partition("md-sidebar--primary")[2].partition("md-sidebar--")[0]


def test_every_page_is_built_and_in_the_navigation(site: Path) -> None:
    listed = set(re.findall(r'href="([^"#]+\.html)"', navigation(site)))
    assert {page.as_posix() for page in PAGES} == listed
    assert all((site / page).is_file() for page in PAGES)


def test_every_decision_is_listed_by_its_title(site: Path) -> None:
    listed = (site / "adr" / "index.html").read_text("utf-8")
    numbered = [f"{number}. " for number in range(1, len(decisions(DOCS)) + 1)]
    for number, (title, path) in zip(numbered, decisions(DOCS), strict=True):
        assert title.startswith(number)
        assert f'href="{Path(path).with_suffix(".html").name}"' in listed


def test_every_error_and_every_public_name_has_a_place(site: Path) -> None:
    catalogue, reference = ((site / page).read_text("utf-8") for page in ("errors.html", "python.html"))
    codes = re.findall(r'code="([a-z-]+)"', Path(errors.__file__).read_text("utf-8"))
    assert [code for code in codes if f'id="{code}"' not in catalogue and code != errors.Refused.code] == []
    names = [*waybill.__all__, *waybill.engine.__all__]
    assert [name for name in names if not re.search(rf'id="waybill\.[\w.]*\.{name}"', reference)] == []


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_a_page_asks_no_other_host_for_anything(page: Path, site: Path) -> None:
    assert FETCHED.findall((site / page).read_text("utf-8")) == []


def test_every_room_of_the_library_is_on_the_map() -> None:
    rooms = [path.name for path in (ROOT / "src" / "waybill").iterdir() if (path / "__init__.py").exists()]
    table = (DOCS / "contributing.md").read_text("utf-8").partition("## Where everything is")[2].partition("\n## ")[0]
    assert [room for room in rooms if f"| `{room}/` |" not in table] == []


def links(text: str) -> Iterator[str]:
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return (link for link in re.findall(r"\]\(([^)\s]+)\)", prose) if not link.startswith(("http", "#")))


@pytest.mark.parametrize("file", ["README.md", "benchmarks/README.md", "tests/golden/README.md"])
def test_links_outside_the_site_lead_somewhere(file: str) -> None:
    for link in links((ROOT / file).read_text("utf-8")):
        target, _, anchor = link.partition("#")
        place = (ROOT / file).parent / target
        assert place.exists(), link
        headings = re.findall(r"^#+ (.*)$", place.read_text("utf-8"), re.MULTILINE) if anchor else []
        assert not anchor or anchor in [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings], link

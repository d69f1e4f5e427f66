"""Reports in a browser: they look as they should, fit a phone, change colours without a script, and stay inert."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from reports import mixed, read
from waybill.checkpoint import read_checkpoint
from waybill.cli.render import size
from waybill.overview import describe
from waybill.report.page import inspect_page, plan_page

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed: apt-get install chromium")

LOOK = """<!doctype html><body><pre id="seen"></pre><script>
const frame = document.createElement("iframe");
frame.style = "width: WIDTHpx; border: 0";
frame.src = "report.html";
frame.onload = () => {
  const page = frame.contentDocument, root = page.documentElement;
  const style = (element) => frame.contentWindow.getComputedStyle(element);
  const ground = () => style(page.body).backgroundColor;
  const seen = {width: root.clientWidth, content: root.scrollWidth, scripts: page.scripts.length};
  seen.grounds = {}, seen.shown = {};
  for (const theme of ["light", "dark"]) { page.getElementById(theme).click(); seen.grounds[theme] = ground(); }
  for (const kind of ["wide", "narrow"]) seen.shown[kind] = style(page.querySelector("svg." + kind)).display;
  const stop = page.querySelector("summary");
  stop.focus({focusVisible: true});
  seen.focus = page.activeElement === stop ? style(stop).outlineStyle : "lost";
  seen.boxes = [...page.querySelectorAll(".box")].filter((box) => box.scrollWidth > box.clientWidth + 1)
    .every((box) => style(box).overflowX === "auto");
  document.getElementById("seen").textContent = JSON.stringify(seen);
};
document.body.append(frame);
</script>"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    report = describe(read_checkpoint(mixed(tmp_path_factory.mktemp("browser") / "mixed")))
    return {"inspect": inspect_page(report, size), "plan": plan_page(report.bill, {}, size)}


@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_a_report_fits_its_screen_and_works_without_scripts(
    command: str, width: int, pages: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "report.html").write_text(pages[command], "utf-8")
    (tmp_path / "look.html").write_text(LOOK.replace("WIDTH", str(width)))
    seen = look(tmp_path)
    assert seen["width"] == seen["content"] == width, "the page scrolls sideways"
    assert seen["grounds"] == {"light": "rgb(244, 245, 248)", "dark": "rgb(14, 17, 22)"}
    assert seen["shown"] == (
        {"wide": "none", "narrow": "block"} if width == 390 else {"wide": "block", "narrow": "none"}
    )
    assert seen["focus"] == "solid" and seen["boxes"] and seen["scripts"] == 0


def look(folder: Path) -> dict[str, Any]:
    """What a page that frames the report finds of it; the browser itself must have had nothing to complain of."""
    command = [
        str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        "--allow-file-access-from-files", f"--user-data-dir={folder / 'profile'}", "--window-size=1400,1000",
        "--enable-logging=stderr", "--dump-dom", "--virtual-time-budget=5000", (folder / "look.html").as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert complaints == []
    seen = json.loads(read(done.stdout).one("seen").text)
    assert isinstance(seen, dict)
    return seen

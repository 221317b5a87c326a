"""The page in headless Chromium, as narrow as a telephone and as wide as a screen, light and dark."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess

import pytest

from dgc_horovod.tools.report.figures import Run
from dgc_horovod.tools.report.page import page
from tests.helpers.records import records

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium (apt-get install chromium)")

# looks at the page in a frame of each width: what sticks out, and every text's colour beside that behind it
LOOK = """
<!doctype html><body><script>
const found = [];
function background(element) {
  for (; element; element = element.parentElement) {
    const colour = getComputedStyle(element).backgroundColor;
    if (!colour.includes(", 0)")) return colour;
  }
}
for (const width of [400, 1600]) {
  const frame = document.createElement("iframe");
  frame.style = `border: 0; width: ${width}px; height: 900px`;
  frame.srcdoc = PAGE;
  frame.onload = () => {
    const inside = frame.contentDocument, texts = [];
    for (const element of inside.querySelectorAll("main *")) {
      const text = [...element.childNodes].filter(node => node.nodeType == 3).map(node => node.data.trim()).join("");
      if (text) texts.push([text.slice(0, 40), getComputedStyle(element).color, background(element)]);
    }
    const drawn = [...inside.querySelectorAll("figure img")].filter(image => image.naturalWidth);
    const lowest = Math.min(...drawn.map(image => image.clientWidth));
    found.push({width, needs: inside.documentElement.scrollWidth, texts, lowest, plots: drawn.length});
    if (found.length == 2) document.body.innerHTML = "<pre>" + JSON.stringify(found).replace(/</g, "&lt;") + "</pre>";
  };
  document.body.append(frame);
}
</script></body>
"""


def look(folder, scheme: int) -> list[dict]:
    """What Chromium finds at each width; `scheme` 0: dark, 1: light."""
    run = Run(records((0.06, 0.06, 0.01, 0.06), skipped=1, skips=[[100, "rank 1"]], advice=["rank 2 is slow"] * 3))
    run.records[0]["run"] = {"command": "python " + "x" * 300, "hosts": "a-very-long-name.example.org:8," * 40,
                             "settings": [["density", "0.01", "flag --density"]]}  # fmt: skip
    text = json.dumps(page(run)).replace("</", "<\\/")
    (folder / "look.html").write_text(LOOK.replace("PAGE", text, 1))
    command = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile",
        f"--blink-settings=preferredColorScheme={scheme}", "--virtual-time-budget=5000", "--dump-dom",
        f"file://{folder}/look.html",
    ]  # fmt: skip
    out = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    return json.loads(html.unescape(re.search(r"<pre>(.*?)</pre>", out, re.S)[1]))


def luminance(colour: str) -> float:
    """Of WCAG 2.1, in [0, 1]."""
    shares = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["dark", "light"])
def test_nothing_sticks_out_and_every_text_can_be_read(tmp_path, scheme):
    found = {each["width"]: each for each in look(tmp_path, scheme)}
    assert found.keys() == {400, 1600}
    for width, seen in found.items():
        assert seen["needs"] <= width, f"at {width} px the page is {seen['needs']} px wide"
        assert seen["plots"] == 8 and seen["lowest"] > 300
        papers = [luminance(behind) for *_, behind in seen["texts"]]
        assert all(paper < 0.2 for paper in papers) if scheme == 0 else all(paper > 0.7 for paper in papers)
        for text, colour, behind in seen["texts"]:
            assert contrast(colour, behind) >= 3, f"{text!r}: {colour} on {behind}"
        ordinary = [contrast(colour, behind) for _, colour, behind in seen["texts"]]
        assert sum(each >= 4.5 for each in ordinary) > 0.9 * len(ordinary)

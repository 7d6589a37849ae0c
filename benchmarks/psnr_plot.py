"""Draw results/psnr_over_time.json as docs/pictures/psnr_over_time.svg.

    python -m benchmarks.psnr_plot [--data FILE] [--out FILE]

The picture has no background, and colours for light and dark pages. Time is on a logarithmic axis.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "benchmarks" / "results" / "psnr_over_time.json"
PICTURE = ROOT / "docs" / "pictures" / "psnr_over_time.svg"

WIDTH, HEIGHT = 720, 340
LEFT, RIGHT, TOP, BOTTOM = 52, 24, 34, 44

#: Seconds that have a label on the time axis.
TICKS = {1: "1 s", 2: "2 s", 5: "5 s", 10: "10 s", 20: "20 s", 30: "30 s", 60: "1 min", 120: "2 min", 300: "5 min"}
TICKS |= {600: "10 min", 1800: "30 min", 3600: "1 h"}

#: Line and text of each curve in turn, on light and on dark pages; they differ in brightness too.
COLOURS = [("#0b63ce", "#6cb6ff"), ("#b35900", "#ffa657"), ("#1a7f37", "#57d364")]

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f; }
.grid { stroke: #8c959f; stroke-opacity: .35; }
.curve { fill: none; stroke-width: 2.5; stroke-linejoin: round; }
"""


def style() -> str:
    """The rules of all classes, then those that differ on dark pages."""
    light, dark = [], []
    for number, (on_light, on_dark) in enumerate(COLOURS):
        light.append(f".c{number} {{ stroke: {on_light}; }} .f{number} {{ fill: {on_light}; }}")
        dark.append(f".c{number} {{ stroke: {on_dark}; }} .f{number} {{ fill: {on_dark}; }}")
    rules = "\n".join(["text { fill: #d1d7e0; }", *dark])
    return f"{STYLE}{chr(10).join(light)}\n@media (prefers-color-scheme: dark) {{\n{rules}\n}}\n"


def draw(data: dict[str, Any]) -> str:
    """The picture as SVG."""
    curves = data["curves"]
    points = [point for curve in curves for point in curve["points"]]
    seconds, values = [point["seconds"] for point in points], [point["psnr"] for point in points]
    first, last = min(seconds), max(seconds)
    low, high = 2 * math.floor(min(values) / 2), 2 * math.ceil(max(values) / 2)

    def x(at: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(at / first) / math.log(last / first)

    def y(psnr: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (psnr - low) / (high - low)

    def text(left: float, top: float, words: str, anchor: str = "middle", kind: str = "") -> str:
        return f'<text x="{left:.1f}" y="{top:.1f}" text-anchor="{anchor}"{kind}>{escape(words)}</text>'

    parts = []
    for psnr in range(low, high + 1, 4):
        parts.append(f'<path class="grid" d="M{LEFT} {y(psnr):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(text(LEFT - 8, y(psnr) + 4, str(psnr), "end"))
    for at, label in TICKS.items():
        if first <= at <= last:
            parts.append(f'<path class="grid" d="M{x(at):.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
            parts.append(text(x(at), HEIGHT - BOTTOM + 18, label))
    parts.append(text(8, 18, f"PSNR in dB of the held-out view {data['view']}", "start"))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "wall time on two CPU cores, logarithmic"))
    for number, curve in enumerate(curves):
        places = [(x(point["seconds"]), y(point["psnr"])) for point in curve["points"]]
        line = " ".join(f"{left:.1f},{top:.1f}" for left, top in places)
        parts.append(f'<polyline class="curve c{number}" points="{line}"/>')
        parts += [f'<circle class="f{number}" cx="{left:.1f}" cy="{top:.1f}" r="3.5"/>' for left, top in places]
        left, top = places[-1]
        words = f"{curve['program']}: {curve['points'][-1]['psnr']:.1f} dB"
        parts.append(text(min(left, WIDTH - RIGHT), top - 10, words, "end", f' class="f{number}"'))
    body = "\n".join(parts)
    title = escape(f"PSNR over wall time: {', '.join(curve['program'] for curve in curves)}")
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">'
    return f"{head}\n<title>{title}</title>\n<style>{style()}</style>\n{body}\n</svg>\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--out", type=Path, default=PICTURE)
    arguments = parser.parse_args()
    arguments.out.write_text(draw(json.loads(arguments.data.read_text(encoding="utf-8"))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Draw docs/method.svg: one shared update, and a switch for each loop.

    python docs/method.py

Text is at least 12 pixels high on a page of 360 pixels. The colors follow the reader's light or dark mode.
"""

from pathlib import Path


WIDTH, HEIGHT = 360, 300
LEFT, STEP, BLOCK = 36, 76, 56
STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328; text-anchor: middle; }
.start { text-anchor: start; }
.bold { font-weight: 600; }
.on { fill: #0a58ca; font-weight: 600; }
.off { fill: #59636e; }
.block { fill: #eaeef2; stroke: #57606a; }
.update { fill: #cfe2ff; stroke: #0a58ca; }
.path { stroke: #57606a; stroke-width: 1.5; fill: none; }
.wire { stroke: #0a58ca; stroke-width: 2.5; fill: none; }
.cut { stroke: #8c959f; stroke-width: 2.5; fill: none; }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc; }
  .on { fill: #79b8ff; }
  .off { fill: #b1bac4; }
  .block { fill: #2a313c; stroke: #9198a1; }
  .update { fill: #1b3a66; stroke: #79b8ff; }
  .path { stroke: #9198a1; }
  .wire { stroke: #79b8ff; }
  .cut { stroke: #7d8590; }
}"""


def row(top: int, title: str, gates: list[int], end: str) -> list[str]:
    """Return the elements of one row: the shared update, a switch for each loop, and the K applications of the block.

    Args:
        top: Distance from the upper edge in pixels.
        title: Text above the row.
        gates: [K] factors of the update. 0 is an open switch.
        end: Text to the right of the last loop.
    """
    middle = top + 88
    parts = [
        f'<text class="start bold" x="8" y="{top + 12}">{title}</text>',
        f'<rect class="update" x="{LEFT}" y="{top + 20}" width="{3 * STEP + BLOCK}" height="22" rx="4"/>',
        f'<text class="on" x="{LEFT + (3 * STEP + BLOCK) / 2}" y="{top + 36}">one shared LoRA update</text>',
        f'<path class="path" d="M8 {middle + 14} H{LEFT}" marker-end="url(#arrow)"/>',
    ]
    for loop, gate in enumerate(gates):
        x = LEFT + loop * STEP
        center = x + BLOCK // 2
        if gate:
            wire = f'<path class="wire" d="M{center} {top + 42} V{middle}"/>'
            label = f'<text class="start on" x="{center + 6}" y="{top + 68}">×{gate}</text>'
        else:
            switch = f"V{top + 50} L{center - 13} {top + 66} M{center} {top + 70}"
            wire = f'<path class="cut" d="M{center} {top + 42} {switch} V{middle}"/>'
            label = f'<text class="start off" x="{center + 6}" y="{top + 68}">off</text>'
        parts += [
            wire,
            label,
            f'<rect class="block" x="{x}" y="{middle}" width="{BLOCK}" height="28" rx="4"/>',
            f'<text x="{center}" y="{middle + 19}">loop {loop + 1}</text>',
        ]
        if loop < len(gates) - 1:
            parts.append(f'<path class="path" d="M{x + BLOCK} {middle + 14} H{x + STEP}" marker-end="url(#arrow)"/>')
    parts.append(f'<text class="start" x="{LEFT + 3 * STEP + BLOCK + 4}" y="{middle + 19}">{end}</text>')
    return parts


def main() -> None:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="540" role="img"'
        ' aria-label="In training, the shared update is switched on or off in each loop. At inference it is always on.">',
        f"<style>{STYLE}</style>",
        '<defs><marker id="arrow" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
        '<path class="path" d="M0 0 L6 3 L0 6"/></marker></defs>',
        *row(4, "Training: random switches for each example", [2, 0, 2, 2], "→"),
        *row(148, "Inference: all on", [1, 1, 1, 1], "→"),
        f'<text class="start" x="8" y="{HEIGHT - 8}">The same block runs 4 times. 2 = 1 / (1 - p) at p = 0.5</text>',
        "</svg>",
    ]
    Path(__file__).with_suffix(".svg").write_text("\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

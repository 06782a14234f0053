"""Draw docs/method.svg: one shared update, and a switch for each loop.

    python docs/method.py

Text is at least 12 pixels high on a page of 360 pixels. The colors follow the reader's light or dark mode.
"""

from pathlib import Path


WIDTH, HEIGHT = 360, 142
HALF, LEFT, STEP, BLOCK = 186, 16, 38, 30
STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328; text-anchor: middle; }
.start { text-anchor: start; }
.bold { font-weight: 600; }
.on { fill: #0a58ca; font-weight: 600; }
.plain { font-weight: 400; }
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


def half(left: int, title: str, gates: list[int]) -> list[str]:
    """Return the elements of one half: the shared update, a switch for each loop, and the K applications of the block.

    Args:
        left: Distance from the left edge in pixels.
        title: Text above the half.
        gates: [K] factors of the update. 0 is an open switch.
    """
    first, end = left + LEFT, left + LEFT + 3 * STEP + BLOCK
    parts = [
        f'<text class="start bold" x="{left + 2}" y="15">{title}</text>',
        f'<rect class="update" x="{first}" y="24" width="{end - first}" height="22" rx="4"/>',
        f'<text class="on plain" x="{(first + end) / 2}" y="40">shared LoRA update</text>',
        f'<path class="path" d="M{left + 2} 106 H{first}" marker-end="url(#arrow)"/>',
    ]
    for loop, gate in enumerate(gates):
        x = first + loop * STEP
        center = x + BLOCK // 2
        if gate:
            wire = f'<path class="wire" d="M{center} 46 V93"/>'
            label = f'<text class="start on" x="{center + 4}" y="74">×{gate}</text>'
        else:
            wire = f'<path class="cut" d="M{center} 46 V54 L{center - 10} 70 M{center} 74 V93"/>'
            label = f'<text class="start off" x="{center + 4}" y="74">off</text>'
        target = x + STEP if loop < len(gates) - 1 else end + 14
        parts += [
            wire,
            label,
            f'<rect class="block" x="{x}" y="93" width="{BLOCK}" height="26" rx="4"/>',
            f'<text x="{center}" y="110">{loop + 1}</text>',
            f'<path class="path" d="M{x + BLOCK} 106 H{target}" marker-end="url(#arrow)"/>',
        ]
    parts.append(f'<text class="off" x="{(first + end) / 2}" y="136">loops of one block</text>')
    return parts


def main() -> None:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="540" role="img"'
        ' aria-label="In training, the shared update is switched on or off in each loop. At inference it is always on.">',
        f"<style>{STYLE}</style>",
        '<defs><marker id="arrow" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
        '<path class="path" d="M0 0 L6 3 L0 6"/></marker></defs>',
        *half(0, "Training: random", [2, 0, 2, 2]),
        *half(HALF, "Inference: all on", [1, 1, 1, 1]),
        "</svg>",
    ]
    Path(__file__).with_suffix(".svg").write_text("\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

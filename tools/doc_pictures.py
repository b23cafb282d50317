"""The pictures of the documents that come from the library itself: the ladder and the prepacked layout.

python tools/doc_pictures.py [folder]     writes ladder.svg and prepacked.svg, to docs/ by default

The planner and pack_weight() are asked, so a picture can't say what the library does not do; what it says is in its
<dc:description> too, which tests/test_docs.py compares. Needs matplotlib. The same version writes the same bytes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from fp4linear import _core

DOCS = Path(__file__).parents[1] / "docs"
MOST_ROWS = 8192
N = 4096
K, K_NOT_PREPACKED = 4096, 4128  # a multiple of 64, and of 32 only
# What the planner is asked. gemv_max_m of the instruction sets: cpp/cpu/isa.cc, where their measurement is.
DEVICES: dict[str, dict[str, Any]] = {
    "CPU, AVX-512": {"device": "cpu", "cpu_gemv_max_m": 48},
    "CPU, AVX2": {"device": "cpu", "cpu_gemv_max_m": 6},
    "CPU, portable": {"device": "cpu", "cpu_gemv_max_m": 1},
    "GPU, SM75": {"device": "sm75"},
    "GPU, SM80 to SM89": {"device": "sm80"},
    "GPU, SM90": {"device": "sm90"},
    "GPU, SM100, SM120": {"device": "sm100"},
    "SM90, K % 64 = 32": {"device": "sm90", "k": K_NOT_PREPACKED},
    "SM90, batch_invariant": {"device": "sm90", "batch_invariant": True},
}
# Light enough for black letters; the page behind may be dark, so the picture brings its own paper.
PAPER, INK = "#fbfbf8", "#222222"
COLOURS = {
    "cpu_gemv": "#a6d8e8",
    "cpu_gemm": "#6fb1d6",
    "gemv_tensor_core": "#b9e0a5",
    "gemv_scalar": "#e4e59b",
    "gemm_fused": "#7cc27f",
    "dequant_cublas": "#f0b27a",
}
LANE_COLOURS = ("#a6d8e8", "#b9e0a5", "#f0d58c", "#e8b4c8")  # by l % 4
SHOWN_LANE = 5


def ladder() -> dict[str, list[tuple[int, str]]]:
    """For every device the rows of x from which on a path is taken, in order."""
    steps: dict[str, list[tuple[int, str]]] = {}
    for name, asked in DEVICES.items():
        options = {key: value for key, value in asked.items() if key != "k"}
        found: list[tuple[int, str]] = []
        for m in range(1, MOST_ROWS + 1):
            path = _core.plan(N, asked.get("k", K), m, **options).path
            assert path is not None
            if not found or found[-1][1] != path:
                found.append((m, path))
        steps[name] = found
    return steps


def ladder_in_words() -> str:
    lines = [f"{name}: " + ", ".join(f"{path} from M = {m}" for m, path in steps) for name, steps in ladder().items()]
    return "; ".join(lines)


def lanes_and_words() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Lane and word that hold the code of (row, k) of a unit: [16, 64] each."""
    scales = np.full((16, 4), 0x38, np.uint8)
    bits = np.zeros((16, 64, 576), np.uint8)
    for row in range(16):
        for k in range(64):
            b = np.zeros((16, 32), np.uint8)
            b[row, k // 2] = 0x7 << 4 * (k % 2)
            bits[row, k] = _core.pack_weight(b, scales, 16, 64, 16, "prepacked").reshape(-1)
    first_byte = (bits[..., :512] != 0).argmax(-1)
    return first_byte // 16, first_byte % 16 // 4


def draw_ladder(pyplot: Any) -> Any:
    figure, axes = pyplot.subplots(figsize=(10, 4.2), layout="constrained")
    steps = ladder()
    for place, (name, found) in enumerate(steps.items()):
        ends = [m for m, _ in found[1:]] + [MOST_ROWS * 1.35]
        for (start, path), end in zip(found, ends, strict=True):
            left, right = np.log2(start - 0.5 if start > 1 else 0.75), np.log2(end - 0.5)
            axes.barh(place, right - left, left=left, height=0.82, color=COLOURS[path], edgecolor=PAPER, linewidth=2)
            if right - left > 1.4:
                axes.text((left + right) / 2, place, path, ha="center", va="center", fontsize=9)
        axes.text(np.log2(0.7), place, name, ha="right", va="center", fontsize=9)
    ticks = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
    axes.set_xticks(np.log2(ticks), [str(tick) for tick in ticks])
    axes.set(yticks=[], xlim=(np.log2(0.75), np.log2(MOST_ROWS * 1.3)), xlabel="M, rows of x")
    axes.invert_yaxis()
    axes.set_title("The path that a call takes: the planner's answers, bf16, block_size 16", fontsize=10, loc="left")
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure


def draw_prepacked(pyplot: Any) -> Any:
    lanes, words = lanes_and_words()
    figure, axes = pyplot.subplots(figsize=(10, 5.4), layout="constrained")
    for row in range(16):
        for k in range(0, 64, 2):
            lane, x = lanes[row, k], k + k // 16  # a gap between slices
            shown = lane == SHOWN_LANE
            colour = INK if shown else LANE_COLOURS[lane % 4]
            axes.add_patch(pyplot.Rectangle((x, row), 2, 1, facecolor=colour, edgecolor=PAPER, linewidth=0.6))
            if shown or k < 16:  # every slice repeats the first
                axes.text(
                    x + 1, row + 0.52, lane, ha="center", va="center", fontsize=5.5, color=PAPER if shown else INK
                )
    for piece in range(4):
        assert (words[:, 16 * piece : 16 * piece + 16] == piece).all()
        axes.text(17 * piece + 8, -0.5, f"slice {piece}: word {piece} of every lane", ha="center", fontsize=8)
    axes.text(-0.6, 8, "16 rows", rotation=90, ha="right", va="center", fontsize=8)
    axes.text(
        33.5,
        16.9,
        "64 K, two codes a cell; the number is the lane that holds them, the same in every slice",
        ha="center",
        fontsize=8,
    )
    top, width = 20.0, 67 / 576  # of a byte
    for lane in range(32):
        shown = lane == SHOWN_LANE
        colour = INK if shown else LANE_COLOURS[lane % 4]
        box = pyplot.Rectangle((16 * lane * width, top), 16 * width, 2, facecolor=colour, edgecolor=PAPER)
        axes.add_patch(box)
        axes.text((16 * lane + 8) * width, top + 1, lane, ha="center", va="center", fontsize=6,
                  color=PAPER if shown else INK)  # fmt: skip
    axes.add_patch(pyplot.Rectangle((512 * width, top), 64 * width, 2, facecolor="#d9d9d2", edgecolor=PAPER))
    axes.text(544 * width, top + 1, "64 scales", ha="center", va="center", fontsize=7)
    text = "the unit in memory: 576 bytes, 16 of codes a lane (four words), then the E4M3 bytes of its 16 x 4 blocks"
    axes.text(33.5, top - 0.5, text, ha="center", fontsize=8)
    axes.set(xlim=(-2.5, 68), ylim=(top + 2.3, -1.6), xticks=[], yticks=[])
    title = f"A prepacked unit of 16 x 64 weights; dark is what lane {SHOWN_LANE} of a warp holds"
    axes.set_title(title, fontsize=10, loc="left")
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure


def main(folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings = {"svg.hashsalt": "fp4linear", "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK}
    pyplot.rcParams.update({**settings, "figure.facecolor": PAPER, "axes.facecolor": PAPER})
    pictures = {
        "ladder": (draw_ladder, ladder_in_words()),
        "prepacked": (draw_prepacked, "Lanes and words of the codes of a unit of 16 x 64 weights"),
    }
    for name, (draw, words) in pictures.items():
        figure = draw(pyplot)
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None, "Description": words})
        pyplot.close(figure)
        print(folder / f"{name}.svg")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS)

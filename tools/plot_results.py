"""Draw the forward pass of the gated delta rule beside other libraries, and beside what the machine allows.

    python tools/plot_results.py results/h200/op_forward.csv docs/kernels

From the last row of every shape and library (`bench_op.py`), two figures: `forward_times.svg`, the time of a call by
shape, and `forward_roofline.svg`, operations a second over operations a byte, both as the mathematics counts them: K S,
Q S, K^T X, A W, P X a value head, K K^T and Q K^T a key head, every input and output once through memory.
"""

import argparse
import csv
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt

NAMES = {"ours": "qla_megatron", "flash_qla": "FlashQLA", "flashinfer": "FlashInfer", "fla": "FLA"}
COLOURS = {"ours": "#1f5fa8", "flash_qla": "#d98032", "flashinfer": "#3f9154", "fla": "#8a8a8a"}
D, CHUNK = 128, 64
PEAK_FLOPS, PEAK_BYTES = 790e12, 4.3e12  # what a large product and a large copy reach on an H200
Row = dict[str, str]


def newest_rows(path: Path) -> list[Row]:
    """One row a shape, library and gate regime: the last one."""
    with path.open(newline="") as file:
        rows = {(r["h_qk"], r["h_v"], r["seqs"], r["impl"], r["gate"]): r for r in csv.DictReader(file)}
    return list(rows.values())


def tokens_of(seqs: str) -> int:
    """`4096x8`, `24576+8192` or `32768/8seq` as tokens."""
    if "/" in seqs:
        return int(seqs.split("/")[0])
    if "x" in seqs:
        length, count = seqs.split("x")
        return int(length) * int(count)
    return sum(int(part) for part in seqs.split("+"))


def work_of(row: Row) -> tuple[float, float]:
    """Operations and bytes of a forward pass, states left aside."""
    tokens, h, hv = tokens_of(row["seqs"]), int(row["h_qk"]), int(row["h_v"])
    by_key_head = 2 * 2 * CHUNK * D
    by_value_head = 3 * 2 * D * D + 2 * 2 * CHUNK * D
    return tokens * (h * by_key_head + hv * by_value_head), tokens * (2 * h * D * 2 + hv * (2 * D * 2 + 8))


def draw_times(rows: list[Row], path: Path) -> None:
    shapes = list(dict.fromkeys((r["h_qk"], r["h_v"], r["seqs"]) for r in rows))
    times = {(r["h_qk"], r["h_v"], r["seqs"], r["impl"]): float(r["fwd_ms"]) for r in rows}
    present = [name for name in NAMES if any(r["impl"] == name for r in rows)]
    figure, axes = plt.subplots(figsize=(7, 0.8 + 0.16 * len(shapes) * (len(present) + 1)))
    for n, name in enumerate(present):
        here = [(m, times[*shape, name]) for m, shape in enumerate(shapes) if (*shape, name) in times]
        places = [m * (len(present) + 1) + n for m, _ in here]
        bars = axes.barh(places, [t for _, t in here], height=0.9, color=COLOURS[name], label=NAMES[name])
        axes.bar_label(bars, fmt="%.3f", padding=2, fontsize=6)
    axes.set_yticks([m * (len(present) + 1) + (len(present) - 1) / 2 for m in range(len(shapes))])
    axes.set_yticklabels([f"{h}/{hv}  {seqs}" for h, hv, seqs in shapes], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("forward pass, ms")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7)
    save(figure, path)


def draw_roofline(rows: list[Row], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(6, 4))
    low, ridge, high = 10.0, PEAK_FLOPS / PEAK_BYTES, 1000.0
    roof = [(low, low * PEAK_BYTES), (ridge, PEAK_FLOPS), (high, PEAK_FLOPS)]
    axes.plot(*zip(*((x, y / 1e12) for x, y in roof), strict=True), color="black", linewidth=1)
    for name in NAMES:
        points = [(*work_of(r), float(r["fwd_ms"]) * 1e-3) for r in rows if r["impl"] == name]
        if points:
            x, y = zip(*((flops / moved, flops / seconds / 1e12) for flops, moved, seconds in points), strict=True)
            axes.scatter(x, y, s=14, color=COLOURS[name], label=NAMES[name])
    axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="operations a second, 10^12")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    save(figure, path)


def save(figure: plt.Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="a file that bench_op.py wrote")
    parser.add_argument("folder", type=Path, help="where the figures go")
    parser.add_argument("--gate", default="published", help="the gate regime to draw")
    args = parser.parse_args(arguments)
    rows = [row for row in newest_rows(args.results) if row["gate"] == args.gate]
    if not rows:
        raise SystemExit(f"results must hold rows of the gate regime {args.gate}, got none in {args.results}")
    mpl.rcParams["svg.hashsalt"] = "results"
    draw_times(rows, args.folder / "forward_times.svg")
    draw_roofline(rows, args.folder / "forward_roofline.svg")


if __name__ == "__main__":
    main()

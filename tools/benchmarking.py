"""What the benchmarks share: shapes, inputs, the way to take times, and what a results file says of itself."""

import argparse
import csv
import datetime
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize, softplus

D = 128
SCALE = D**-0.5
L2_BYTES = 60 << 20
MODELS = ((16, 64), (16, 32), (16, 48), (16, 16), (2, 8), (2, 4))
SETS = {
    "quick": [(16, 64, "32768x1"), (16, 64, "4096x8"), (16, 32, "32768x1"), (16, 32, "4096x8"), (2, 8, "32768x1")],
    "table": [
        (h, hv, lengths)
        for h, hv in MODELS
        for lengths in ("32768x1", "8192x1", "2048x1", "16384x2", "4096x8", "24576+8192", "32768/8seq")
    ],
    "equal": [
        (h, hv, lengths)
        for h, hv in ((16, 64), (16, 48), (32, 32), (16, 32), (8, 32), (8, 24))
        for lengths in ("16384x2", "8192x4", "4096x8", "4096x2", "2048x4", "1024x8")
    ],
    "long": [(2, 8, "262144x1"), (16, 32, "262144x1"), (16, 16, "262144x1"), (16, 32, "262144/64seq")],
}
SETS["all"] = list(dict.fromkeys(case for cases in SETS.values() for case in cases))
# of every row of a results file
FACTS = (
    "gate",
    "mode",
    "n",
    "gpu",
    "driver",
    "torch",
    "tilelang",
    "fla",
    "flash_qla",
    "flashinfer",
    "date",
    "commit",
    "dirty",
    "newest",
    "command",
)


def parse_lengths(text: str) -> list[int]:
    if "/" in text:
        total, count = text.removesuffix("seq").split("/")
        return split_randomly(int(total), int(count))
    if "x" in text:
        length, count = text.split("x")
        return [int(length)] * int(count)
    return [int(part) for part in text.split("+")]


def split_randomly(total: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(42)
    cuts = torch.sort(torch.randperm(total - 1, generator=generator)[: count - 1]).values + 1
    bounds = [0, *cuts.tolist(), total]
    return [end - start for start, end in pairwise(bounds)]


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    h0: Tensor
    cu: Tensor
    cu64: Tensor


def make_inputs(h: int, hv: int, lengths: list[int], gate: str, seed: int) -> Inputs:
    T, N = sum(lengths), len(lengths)
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype, generator=generator)

    q, k = (normalize(normal(1, T, h, D).float(), dim=-1).bfloat16() for _ in range(2))
    v = normal(1, T, hv, D)
    noise = normal(1, T, hv, dtype=torch.float32)
    if gate == "published":
        g = logsigmoid(noise) / 16
        g[:, :, torch.randperm(hv, device="cuda", generator=generator)[: hv - math.ceil(0.75 * hv)]] = 0
    elif gate == "zero":
        g = torch.zeros_like(noise)
    else:
        g = -torch.linspace(0.01, 16, hv, device="cuda") * softplus(noise - 2)
    beta, h0 = normal(1, T, hv, dtype=torch.float32).sigmoid(), normal(N, hv, D, D, dtype=torch.float32)
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    return Inputs(q, k, v, g, beta, h0, cu.int(), cu)


@dataclass(frozen=True)
class Case:
    """Key heads, value heads, and the documents as text and as lengths."""

    h: int
    hv: int
    seqs: str
    lengths: list[int]


def need_gpu(parser: argparse.ArgumentParser) -> None:
    if not torch.cuda.is_available():
        parser.error("times are taken on a CUDA GPU; there is none here")


def parse(parser: argparse.ArgumentParser, table: dict[str, Callable[[], Any]]) -> argparse.Namespace:
    """The arguments that the benchmarks share; `cases` and `implementations` of the result are ready for use."""
    parser.add_argument("--set", choices=SETS, default="quick")
    parser.add_argument("--one", nargs=3, metavar=("H", "HV", "LENGTHS"))
    parser.add_argument("--impl", default=",".join(table), help="of %(default)s")
    parser.add_argument("--gate", choices=("published", "zero", "trained"), default="published")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="of the code, where there is no git history")
    parser.add_argument("--dirty", action="store_true", help="the code differs from --commit")
    args = parser.parse_args()
    args.cases, args.implementations = [], {}
    for h, hv, seqs in [args.one] if args.one else SETS[args.set]:
        try:
            args.cases.append(Case(int(h), int(hv), seqs, parse_lengths(seqs)))
        except ValueError:
            parser.error(f"--one must be heads and lengths such as 16 64 4096x8, got {h} {hv} {seqs}")
    names = args.impl.split(",")
    for name in names:
        if name not in table:
            parser.error(f"--impl must name some of {', '.join(table)}, got {name!r}")
    need_gpu(parser)
    for name in names:
        try:
            args.implementations[name] = table[name]()
        except ImportError as error:
            print(f"{name} is not there: {error}", file=sys.stderr)
    return args


def time_ms(calls: list[Callable[[], Any]], budget_ms: float = 120) -> tuple[float, str, int]:
    """Median time of one call of several made in turn, how it was taken, and from how many replays."""

    def all_calls() -> None:
        for call in calls:
            call()

    for _ in range(3):
        all_calls()
    torch.cuda.synchronize()
    mode, run = "graph", all_calls
    try:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            all_calls()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            all_calls()
        run = graph.replay
    except Exception as error:
        mode = "event"
        print(f"no graph: {error!r}"[:200], file=sys.stderr)
        torch.cuda.synchronize()
    run()
    torch.cuda.synchronize()
    n = max(5, min(200, int(budget_ms / max(_elapsed(run), 1e-3))))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(n)]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in events) / len(calls), mode, n


def _elapsed(run: Callable[[], Any]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def surroundings(commit: str | None, is_dirty: bool) -> dict[str, str]:
    """What the results depend on. Where there is no git history, `commit` and `is_dirty` stand in for it."""

    def output(*command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    def release(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return ""

    if commit is None:
        commit = output("git", "rev-parse", "--short", "HEAD")
        is_dirty = bool(output("git", "status", "--porcelain", "--untracked-files=no"))
    if not commit:
        raise SystemExit("--commit must be given where there is no git history, got none")
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "tilelang": release("tilelang"),
        "fla": release("flash-linear-attention"),
        "flash_qla": release("flash-qla"),
        "flashinfer": release("flashinfer-python"),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
        "commit": commit,
        "dirty": "yes" if is_dirty else "no",
        "command": " ".join([f"tools/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
    }


def append_rows(path: Path, rows: list[dict[str, str]], commit: str, columns: Sequence[str]) -> None:
    """Add rows to a results file; `newest` says which rows are of the newest commit."""
    old: list[dict[str, str]] = []
    if path.exists():
        with path.open(newline="") as file:
            old = list(csv.DictReader(file))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for row in old + rows:
            writer.writerow(row | {"newest": "yes" if row["commit"] == commit else "no"})

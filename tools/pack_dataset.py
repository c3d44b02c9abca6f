"""Make a dataset for training from text, train a tokenizer, or look at how datasets pack.

Examples: `python tools/pack_dataset.py --help`.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from qla_megatron.data.corpus import jsonl_documents, read_info, stdlib_corpus, text_documents, text_files, write_corpus
from qla_megatron.data.tokenize import train_tokenizer
from qla_megatron.recipes.upstream import quiet_imports

EXAMPLES = """
examples:
  one document a file; the shell may expand the names, and folders are searched to any depth:
      python tools/pack_dataset.py --text notes/*.md src --suffix .md .py --tokenizer byte --out data/notes

  one document a line of JSON, {"text": "..."}, with a model's tokenizer and four processes:
      python tools/pack_dataset.py --jsonl crawl.jsonl --tokenizer models/Qwen3.5-9B --workers 4 --out data/crawl

  Python's own standard library, about 10 MB that every machine has:
      python tools/pack_dataset.py --stdlib --out data/stdlib

  a tokenizer of its own for it, and the dataset with that one:
      python tools/pack_dataset.py train-tokenizer --stdlib --vocab-size 248320 --out data/stdlib_bpe
      python tools/pack_dataset.py --stdlib --tokenizer data/stdlib_bpe --out data/stdlib

  how it packs into sequences of 32768 tokens whose documents start at multiples of 64, with a plot, and how evenly
  steps of 32 sequences spread over 8 data-parallel processes (any Megatron .bin/.idx will do):
      python tools/pack_dataset.py stats data/stdlib --seq-length 32768 --align 64 --plot lengths.png \\
          --global-batch 32 --data-parallel 8

what comes out:
  PREFIX.bin and PREFIX.idx, Megatron's format, for --data-path or a recipe's data.paths; PREFIX.json says with which
  tokenizer, vocabulary size and end-of-document id. Packing happens while training, so that the sequence length and the
  alignment can change without making the files again. --text and --stdlib shuffle the files, so that Megatron's --split
  holds out documents of all kinds; the lines of --jsonl keep their order: shuffle them first if --split is to be used.
"""


def parse(arguments: list[str]) -> argparse.Namespace:
    """Options, with `command` as the function that does the work."""
    kinds = {"stats": parse_stats, "train-tokenizer": parse_train_tokenizer}
    if arguments and arguments[0] in kinds:
        return kinds[arguments[0]](arguments[1:])
    return parse_make(arguments)


def add_sources(parser: argparse.ArgumentParser) -> None:
    """Where documents come from."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", nargs="+", metavar="PATH", help="text files or folders, one document a file")
    source.add_argument(
        "--jsonl", nargs="+", metavar="FILE", help="files of one JSON object a line, one document a line"
    )
    source.add_argument("--stdlib", action="store_true", help="the sources of Python's standard library")
    parser.add_argument("--suffix", nargs="+", default=[], metavar=".EXT", help="of the files to take from folders")
    parser.add_argument("--key", default="text", help="key of the text in a line of --jsonl (default: text)")
    parser.add_argument("--seed", type=int, default=0, help="of the shuffle of files (default: 0)")
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")


def parse_make(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        usage="%(prog)s (--text PATH ... | --jsonl FILE ... | --stdlib) --out PREFIX [options]\n"
        "       %(prog)s stats PREFIX [options]\n       %(prog)s train-tokenizer (--text ... | ...) --out FOLDER",
        description=__doc__.splitlines()[0],
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_sources(parser)
    parser.add_argument("--out", metavar="PREFIX", required=True, help="path of the result, without .bin or .idx")
    parser.add_argument(
        "--tokenizer", default="byte", help="byte (default), a tokenizer.json, or a folder that holds one"
    )
    parser.add_argument("--eod", help="the token that ends a document (default: <|endoftext|>, else the eos_token)")
    parser.add_argument("--workers", type=int, default=1, help="processes that tokenize (default: 1)")
    parser.set_defaults(command=make_dataset)
    return parser.parse_args(arguments)


def parse_train_tokenizer(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"{Path(sys.argv[0]).name} train-tokenizer",
        description="Train byte-pair encoding on a corpus, and write a folder that --tokenizer takes.",
    )
    add_sources(parser)
    parser.add_argument("--out", metavar="FOLDER", required=True, help="gets tokenizer.json and tokenizer_config.json")
    parser.add_argument(
        "--vocab-size", type=int, default=248_320, help="the most tokens; small corpora give fewer (default: 248320)"
    )
    parser.add_argument(
        "--min-frequency", type=int, default=2, help="how often a pair must occur to be joined (default: 2)"
    )
    parser.set_defaults(command=make_tokenizer)
    return parser.parse_args(arguments)


def parse_stats(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"{Path(sys.argv[0]).name} stats", description="How a dataset packs; writes nothing but the plot."
    )
    parser.add_argument("prefix", metavar="PREFIX", help="a dataset of Megatron's format, without .bin or .idx")
    parser.add_argument("--seq-length", type=int, default=4096, help="tokens of a packed sequence (default: 4096)")
    parser.add_argument("--align", type=int, default=64, help="documents start at multiples of it (default: 64)")
    parser.add_argument("--global-batch", type=int, default=1, help="sequences of a training step (default: 1)")
    parser.add_argument("--data-parallel", type=int, default=1, help="processes that share a step (default: 1)")
    parser.add_argument("--plot", metavar="FILE", help="draw the lengths of documents into a picture (.png, .svg)")
    parser.set_defaults(command=show_statistics)
    return parser.parse_args(arguments)


def sources(options: argparse.Namespace) -> tuple[Iterable[str], int | None]:
    """The documents that the options name, and their number where it is known."""
    if options.jsonl:
        return jsonl_documents(map(Path, options.jsonl), options.key), None
    if options.stdlib:
        documents = stdlib_corpus(options.seed)
        return documents, len(documents)
    files = text_files(options.text, tuple(options.suffix), options.seed)
    return text_documents(files), len(files)


def make_dataset(options: argparse.Namespace, console: Console) -> None:
    documents, total = sources(options)
    info = write_corpus(
        documents,
        options.out,
        options.tokenizer,
        eod=options.eod,
        workers=options.workers,
        overwrite=options.overwrite,
        total=total,
        show_progress=console.is_terminal,
    )
    print(
        f"{options.out}.bin: {info.documents:,} documents, {info.tokens:,} tokens ({info.dtype}), "
        f"{info.shortest:,} to {info.longest:,} a document, {info.empty:,} empty ones left out\n"
        f"tokenizer {info.tokenizer}, vocabulary {info.vocab_size:,}, documents end with id {info.eod_id}"
    )


def make_tokenizer(options: argparse.Namespace, console: Console) -> None:
    documents, _ = sources(options)
    count = train_tokenizer(
        documents,
        options.vocab_size,
        options.out,
        min_frequency=options.min_frequency,
        overwrite=options.overwrite,
        show_progress=console.is_terminal,
    )
    print(f"{options.out}: {count:,} tokens")
    if count < options.vocab_size:
        print(f"The corpus gives no more; a model may have a larger vocabulary, such as {options.vocab_size:,}.")


def show_statistics(options: argparse.Namespace, console: Console) -> None:
    # Megatron takes seconds to import; --help should not.
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    from qla_megatron.data.packed import check_alignment, packing_statistics

    check_alignment(options.seq_length, options.align)
    if not IndexedDataset.exists(options.prefix):
        raise ValueError(f"PREFIX must name a dataset, got {options.prefix}: no .bin and .idx there")
    with Path(f"{options.prefix}.idx").open("rb") as index:
        is_index = index.read(9) == b"MMIDIDX\0\0"
    if not is_index:
        raise ValueError(f"PREFIX must name a dataset, got {options.prefix}: its .idx is not Megatron's")
    dataset = IndexedDataset(options.prefix)  # kept to the end: it unmaps its index, lengths included, when it goes
    lengths = dataset.sequence_lengths
    statistics = packing_statistics(lengths, options.seq_length, options.align)
    table = Table(
        title=f"{options.prefix}, sequences of {options.seq_length:,}, aligned to {options.align}", show_header=False
    )
    if Path(f"{options.prefix}.json").exists():
        info = read_info(options.prefix)
        table.add_row("tokenizer", f"{info.tokenizer}, vocabulary {info.vocab_size:,}")
    rows = describe(statistics) | describe_work(dataset, options)
    for name, text in rows.items():
        table.add_row(name, text)
    console.print(table)
    console.print(histogram(lengths))
    if options.plot:
        plot_lengths(lengths, options)
        print(f"plot: {options.plot}")


def describe(statistics: dict[str, Any]) -> dict[str, str]:
    return {
        "documents": f"{statistics['documents']:,} ({statistics['too_short']:,} of one token or none are left out)",
        "tokens": f"{statistics['tokens']:,}",
        "samples an epoch": f"{statistics['samples']:,}",
        "slots that hold a token": f"{statistics['fill']:.2%}",
        "slots that have a loss": f"{statistics['loss_share']:.2%}",
        "pieces a sample": f"{statistics['pieces_per_sample']:.1f}",
    }


def describe_work(dataset: Any, options: argparse.Namespace) -> dict[str, str]:
    """Attention's work in the order in which the first epoch is read, and how evenly processes share it."""
    from megatron.core.datasets.utils import Split
    from megatron.core.tokenizers import MegatronTokenizer

    from qla_megatron.data.balance import attention_cost, even_order, imbalance
    from qla_megatron.data.packed import PackedDataset, PackedDatasetConfig

    config = PackedDatasetConfig(
        random_seed=1234, sequence_length=options.seq_length, blend=([options.prefix], None), split="1",
        tokenizer=MegatronTokenizer.from_pretrained(metadata_path={"library": "null-text"}, vocab_size=1),
        align=options.align,
    )  # fmt: skip
    indices = np.arange(len(dataset), dtype=np.int32)
    packed = PackedDataset(dataset, options.prefix, indices, None, Split.train, config)
    costs = np.array([attention_cost(packed, i) for i in range(len(packed))])
    rows = {"tokens that a token sees in attention, mean": f"{costs.mean() / options.seq_length:,.0f}"}
    ranks, block = options.data_parallel, options.global_batch
    if ranks < 1 or block % ranks or block < 1:
        raise ValueError(f"--global-batch must be a multiple of --data-parallel={ranks}, got {block}")
    if ranks > 1:
        steps = costs[: len(costs) // block * block].reshape(-1, block)
        if not len(steps):
            raise ValueError(f"an epoch must hold --global-batch={block} sequences, got {len(costs)}")
        name = "attention of the busiest process over the mean"
        rows[f"{name}, dealt as read"] = f"{np.mean([imbalance(step, ranks) for step in steps]):.3f}"
        even = [imbalance(step[even_order(step, ranks)], ranks) for step in steps]
        rows[f"{name}, balanced"] = f"{np.mean(even):.3f}"
    return rows


def histogram(lengths: np.ndarray) -> Table:
    """Documents and their share of the tokens, by powers of two of the length."""
    table = Table("tokens a document", "documents", "share of tokens", "")
    first, counts, tokens = by_powers_of_two(lengths)
    for k in range(first, len(counts)):
        bar = "█" * round(20 * counts[k] / counts.max())
        share = tokens[k] / max(tokens.sum(), 1)
        table.add_row(f"{2**k:,} to {2 ** (k + 1) - 1:,}", f"{counts[k]:,}", f"{share:.1%}", bar)
    return table


def by_powers_of_two(lengths: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
    """The first k with documents of 2^k to 2^(k+1) - 1 tokens; for each k, documents and their tokens."""
    exponents = np.frexp(np.maximum(lengths, 1))[1] - 1
    return int(exponents.min()), np.bincount(exponents), np.bincount(exponents, weights=lengths)


def plot_lengths(lengths: np.ndarray, options: argparse.Namespace) -> None:
    """Documents, and where the tokens are, by length."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    first, counts, tokens = by_powers_of_two(lengths)
    left = 2.0 ** np.arange(first, len(counts))
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for values, label, offset in ((counts, "documents", 1.0), (tokens, "tokens", 2**0.45)):
        axes.bar(left * offset, values[first:] / values.sum(), width=left * 0.35 * offset, align="edge", label=label)
    axes.axvline(options.seq_length, color="black", linestyle=":", label="sequence length")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens a document")
    axes.set_ylabel("share")
    axes.set_title(f"{Path(options.prefix).name}: {len(lengths):,} documents, {int(lengths.sum()):,} tokens")
    axes.legend()
    try:
        figure.savefig(options.plot, dpi=150)
    finally:
        pyplot.close(figure)


def main(arguments: list[str] | None = None) -> int:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    quiet_imports()
    try:
        options.command(options, Console())
    except (ValueError, OSError) as error:
        print(f"pack_dataset: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Make a dataset for training from text, or look at how one packs. Examples: `python tools/pack_dataset.py --help`."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from qla_megatron.data.corpus import jsonl_documents, read_info, stdlib_corpus, text_documents, text_files, write_corpus
from qla_megatron.recipes.upstream import quiet_imports

EXAMPLES = """
examples:
  one document a file; the shell may expand the names, and folders are searched to any depth:
      python tools/pack_dataset.py --text notes/*.md src --suffix .md .py --tokenizer byte --out data/notes

  one document a line of JSON, {"text": "..."}, with a model's tokenizer and four processes:
      python tools/pack_dataset.py --jsonl crawl.jsonl --tokenizer models/Qwen3.5-9B --workers 4 --out data/crawl

  Python's own standard library, about 10 MB that every machine has:
      python tools/pack_dataset.py --stdlib --out data/stdlib

  how it packs into sequences of 4096 tokens whose documents start at multiples of 64:
      python tools/pack_dataset.py --inspect data/stdlib --seq-length 4096 --align 64

what comes out:
  PREFIX.bin and PREFIX.idx, Megatron's format, for --data-path or a recipe's data.paths; PREFIX.json says with which
  tokenizer, vocabulary size and end-of-document id. Packing happens while training, so that the sequence length and the
  alignment can change without making the files again. --text and --stdlib shuffle the files, so that Megatron's --split
  holds out documents of all kinds; the lines of --jsonl keep their order: shuffle them first if --split is to be used.
"""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split(". ")[0] + ".", epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", nargs="+", metavar="PATH", help="text files or folders, one document a file")
    source.add_argument(
        "--jsonl", nargs="+", metavar="FILE", help="files of one JSON object a line, one document a line"
    )
    source.add_argument("--stdlib", action="store_true", help="the sources of Python's standard library")
    source.add_argument("--inspect", metavar="PREFIX", help="print how an existing dataset packs; writes nothing")
    make = parser.add_argument_group("making a dataset")
    make.add_argument("--out", metavar="PREFIX", help="path of the result, without .bin or .idx")
    make.add_argument(
        "--tokenizer", default="byte", help="byte (default), a tokenizer.json, or a folder that holds one"
    )
    make.add_argument("--eod", help="the token that ends a document (default: <|endoftext|>, else the eos_token)")
    make.add_argument("--suffix", nargs="+", default=[], metavar=".EXT", help="of the files to take from folders")
    make.add_argument("--key", default="text", help="key of the text in a line of --jsonl (default: text)")
    make.add_argument("--seed", type=int, default=0, help="of the shuffle of files (default: 0)")
    make.add_argument("--workers", type=int, default=1, help="processes that tokenize (default: 1)")
    make.add_argument("--overwrite", action="store_true", help="replace an existing dataset")
    inspect = parser.add_argument_group("inspecting")
    inspect.add_argument("--seq-length", type=int, default=4096, help="tokens of a packed sequence (default: 4096)")
    inspect.add_argument("--align", type=int, default=64, help="documents start at multiples of it (default: 64)")
    options = parser.parse_args(arguments)
    if not options.inspect and not options.out:
        parser.error("--out PREFIX is needed to write a dataset")
    return options


def make_dataset(options: argparse.Namespace, console: Console) -> None:
    documents: Iterable[str]
    total = None
    if options.jsonl:
        documents = jsonl_documents(map(Path, options.jsonl), options.key)
    elif options.stdlib:
        documents = stdlib_corpus(options.seed)
        total = len(documents)
    else:
        files = text_files(options.text, tuple(options.suffix), options.seed)
        documents, total = text_documents(files), len(files)
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


def inspect_dataset(options: argparse.Namespace, console: Console) -> None:
    # Megatron takes seconds to import; --help should not.
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    from qla_megatron.data.packed import check_alignment, packing_statistics

    check_alignment(options.seq_length, options.align)
    if not IndexedDataset.exists(options.inspect):
        raise ValueError(f"--inspect must name a dataset, got {options.inspect}: no .bin and .idx there")
    with Path(f"{options.inspect}.idx").open("rb") as index:
        is_index = index.read(9) == b"MMIDIDX\0\0"
    if not is_index:
        raise ValueError(f"--inspect must name a dataset, got {options.inspect}: its .idx is not Megatron's")
    dataset = IndexedDataset(options.inspect)  # kept to the end: it unmaps its index, lengths included, when it goes
    lengths = dataset.sequence_lengths
    statistics = packing_statistics(lengths, options.seq_length, options.align)
    table = Table(
        title=f"{options.inspect}, sequences of {options.seq_length:,}, aligned to {options.align}", show_header=False
    )
    if Path(f"{options.inspect}.json").exists():
        info = read_info(options.inspect)
        table.add_row("tokenizer", f"{info.tokenizer}, vocabulary {info.vocab_size:,}")
    for name, text in describe(statistics).items():
        table.add_row(name, text)
    console.print(table)
    console.print(histogram(lengths))


def describe(statistics: dict[str, Any]) -> dict[str, str]:
    return {
        "documents": f"{statistics['documents']:,} ({statistics['too_short']:,} of one token or none are left out)",
        "tokens": f"{statistics['tokens']:,}",
        "samples an epoch": f"{statistics['samples']:,}",
        "slots that hold a token": f"{statistics['fill']:.2%}",
        "slots that have a loss": f"{statistics['loss_share']:.2%}",
        "pieces a sample": f"{statistics['pieces_per_sample']:.1f}",
    }


def histogram(lengths: np.ndarray) -> Table:
    """Documents and their share of the tokens, by powers of two of the length."""
    table = Table("tokens a document", "documents", "share of tokens", "")
    exponents = np.frexp(np.maximum(lengths, 1))[1] - 1
    counts, tokens = np.bincount(exponents), np.bincount(exponents, weights=lengths)
    for k in range(exponents.min(), len(counts)):
        bar = "█" * round(20 * counts[k] / counts.max())
        share = tokens[k] / max(tokens.sum(), 1)
        table.add_row(f"{2**k:,} to {2 ** (k + 1) - 1:,}", f"{counts[k]:,}", f"{share:.1%}", bar)
    return table


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    quiet_imports()
    console = Console()
    try:
        (inspect_dataset if options.inspect else make_dataset)(options, console)
    except (ValueError, OSError) as error:
        print(f"pack_dataset: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

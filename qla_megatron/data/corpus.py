"""Text -> Megatron's `.bin/.idx` files: where documents come from, and the writer."""

import json
import multiprocessing
import os
import random
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import batched
from pathlib import Path

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from qla_megatron.data.tokenize import TextTokenizer, load_tokenizer

_NOT_PROSE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "__pycache__"}
_SUFFIXES = (".bin", ".json", ".idx")


@dataclass(frozen=True)
class CorpusInfo:
    """What the small JSON beside a dataset says: what it was tokenized with, and its size.

    `tokens` counts the end-of-document tokens; `empty` counts the documents without text, which are left out.
    """

    tokenizer: str
    vocab_size: int
    eod_id: int
    dtype: str
    documents: int
    tokens: int
    shortest: int
    longest: int
    empty: int


def read_info(prefix: str | os.PathLike[str]) -> CorpusInfo:
    """The description of the dataset at `prefix`.

    Raises:
        ValueError: there is none, or it has other fields.
    """
    path = Path(f"{prefix}.json")
    if not path.is_file():
        raise ValueError(f"prefix must name a dataset written by tools/pack_dataset.py, got {prefix}: no {path}")
    try:
        return CorpusInfo(**json.loads(path.read_text(encoding="utf-8")))
    except (TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} must be a description of a dataset, got: {error}") from error


def text_files(paths: Iterable[str | os.PathLike[str]], suffixes: tuple[str, ...] = (), seed: int = 0) -> list[Path]:
    """The files among `paths` and inside the folders among them, shuffled.

    Megatron's `--split` cuts a dataset by the order of its documents, so that files sorted by topic would give a
    held-out part of its own kind. The shuffle depends on the sorted list and `seed` alone.

    Args:
        paths: files, and folders that are searched to any depth.
        suffixes: which files of folders to take, such as (".py", ".txt"); empty takes all.
        seed: of the shuffle.

    Raises:
        ValueError: a path does not exist, or nothing was found.
    """
    found = set()
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f"paths must exist, got {path}")
        inside = (file for file in path.rglob("*") if file.is_file() and (not suffixes or file.suffix in suffixes))
        found |= set(inside) if path.is_dir() else {path}
    if not found:
        raise ValueError(f"paths must hold text files{f' ending in {suffixes}' if suffixes else ''}, got none")
    files = sorted(found)
    random.Random(seed).shuffle(files)
    return files


def text_documents(files: Iterable[Path]) -> Iterator[str]:
    """The text of each file, one document a file.

    Raises:
        ValueError: a file is not UTF-8.
    """
    for file in files:
        try:
            yield file.read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} must be UTF-8 text, got a byte that is not at offset {error.start}") from error


def jsonl_documents(files: Iterable[Path], key: str = "text") -> Iterator[str]:
    """The string under `key` of each line, in the order of the lines; empty lines are passed over.

    Raises:
        ValueError: a line is not a JSON object in UTF-8, or has no string under `key`, or half a surrogate pair in it.
    """
    for file in files:
        with Path(file).open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    value = json.loads(line.decode("utf-8"))[key]
                    if not isinstance(value, str):
                        raise TypeError(f"{type(value).__name__} under {key!r}")
                    value.encode("utf-8")
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(
                        f"{file}:{number} must be a JSON object with a string under {key!r}, got {error!r}"
                    ) from error
                yield value


def stdlib_corpus(seed: int = 0) -> list[str]:
    """The sources of the running interpreter's standard library, one document a file, shuffled: about 10 MB of real
    text that every machine has.

    Tests, IDLE, installed packages and files that differ between installations are left out.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for file in sorted(root.rglob("*.py")):
        folders = file.relative_to(root).parts[:-1]
        is_generated = file.name.startswith("_sysconfigdata") or any(name.startswith("config-") for name in folders)
        if not (_NOT_PROSE & set(folders) or is_generated or file.is_symlink()):
            files.append(file)
    random.Random(seed).shuffle(files)
    return list(text_documents(files))


def write_corpus(
    documents: Iterable[str],
    prefix: str | os.PathLike[str],
    tokenizer: str = "byte",
    *,
    eod: str | None = None,
    workers: int = 1,
    overwrite: bool = False,
    total: int | None = None,
    show_progress: bool = False,
) -> CorpusInfo:
    """Tokenize `documents` into `prefix.bin`, `prefix.idx` and `prefix.json`, each document ended by the eod token.

    The files are written elsewhere in the folder and renamed when all are complete, `.idx` last: a run that is cut
    short leaves nothing that could be taken for a dataset. The result does not depend on `workers`.

    Args:
        documents: texts; empty ones are left out.
        prefix: path of the dataset without suffix; its folder is made.
        tokenizer, eod: see `load_tokenizer`.
        workers: processes that tokenize; 1 means this one.
        overwrite: whether existing files may be replaced.
        total: number of documents, for the progress bar.
        show_progress: whether to show the bar.

    Raises:
        FileExistsError: a file exists and `overwrite` is False.
        ValueError: there is no document with text, `workers` is below 1, or the tokenizer is at fault.
    """
    target = Path(prefix)
    existing = [name for name in (f"{target}{suffix}" for suffix in _SUFFIXES) if Path(name).exists()]
    if existing and not overwrite:
        raise FileExistsError(f"prefix must be free unless overwriting is asked for, got {', '.join(existing)}")
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    text_tokenizer = load_tokenizer(tokenizer, eod)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as folder:
        part = Path(folder) / "part"
        with _token_streams(documents, text_tokenizer, eod, workers) as streams:
            info = _write(_with_progress(streams, total) if show_progress else streams, part, text_tokenizer)
        Path(f"{target}.idx").unlink(missing_ok=True)  # never an old index beside new data
        for suffix in _SUFFIXES:
            Path(f"{part}{suffix}").replace(f"{target}{suffix}")
    return info


def _write(streams: Iterable[np.ndarray], part: Path, tokenizer: TextTokenizer) -> CorpusInfo:
    # Megatron imports torch, which takes seconds that the worker processes should not spend.
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    builder = IndexedDatasetBuilder(f"{part}.bin", dtype=dtype)
    empty = 0
    for tokens in streams:
        if len(tokens):
            builder.add_document(np.append(tokens.astype(dtype), dtype(tokenizer.eod_id)), [len(tokens) + 1])
        else:
            empty += 1
    builder.finalize(f"{part}.idx")
    lengths = builder.sequence_lengths
    if not lengths:
        raise ValueError(f"documents must hold text, got {empty} empty ones and no other")
    info = CorpusInfo(
        tokenizer=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        dtype=np.dtype(dtype).name,
        documents=len(lengths),
        tokens=sum(lengths),
        shortest=min(lengths),
        longest=max(lengths),
        empty=empty,
    )
    Path(f"{part}.json").write_text(json.dumps(asdict(info), indent=2) + "\n", encoding="utf-8")
    return info


@contextmanager
def _token_streams(
    documents: Iterable[str], tokenizer: TextTokenizer, eod: str | None, workers: int
) -> Iterator[Iterable[np.ndarray]]:
    """Token ids of each document, in order."""
    if workers == 1:
        yield map(tokenizer.encode, documents)
        return
    # Spawned, not forked: the tokenizers library and torch own threads that a forked child would wait for.
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, initializer=_start_worker, initargs=(tokenizer.name, eod)) as pool:
        # In batches, since Pool.imap would read all documents into memory ahead of the workers.
        batches = batched(documents, 256 * workers)
        yield (tokens for batch in batches for tokens in pool.map(_encode, batch, chunksize=16))


_worker_tokenizer: TextTokenizer


def _start_worker(tokenizer: str, eod: str | None) -> None:
    global _worker_tokenizer
    _worker_tokenizer = load_tokenizer(tokenizer, eod)


def _encode(text: str) -> np.ndarray:
    return _worker_tokenizer.encode(text)


def _with_progress(streams: Iterable[np.ndarray], total: int | None) -> Iterator[np.ndarray]:
    columns = (
        TextColumn("tokenizing"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("documents, {task.fields[tokens]:,} tokens"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task("", total=total, tokens=0)
        count = 0
        for tokens in streams:
            count += len(tokens) + 1
            progress.update(task, advance=1, tokens=count)
            yield tokens

"""Tokenizers for making datasets: text -> token ids. Local files only; one can be trained on a corpus."""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

BYTE = "byte"
BYTE_VOCABULARY = 257
"""Token ids of the byte tokenizer: 0 to 255 are bytes of UTF-8, 256 ends a document."""

END_OF_DOCUMENT = "<|endoftext|>"


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer ready to use.

    `encode` turns a text into token ids [T], without special tokens; `eod_id` is appended to each document by the
    writer. `name` says what it was made from.
    """

    name: str
    vocab_size: int
    eod_id: int
    encode: Callable[[str], np.ndarray]


def load_tokenizer(source: str, eod: str | None = None) -> TextTokenizer:
    """The tokenizer that `source` names.

    Args:
        source: "byte"; or a `tokenizer.json` of Hugging Face's tokenizers; or a folder that holds one, such as a
            model's.
        eod: the token that ends a document; by default `<|endoftext|>` if the vocabulary has it, else the `eos_token`
            of the folder's `tokenizer_config.json`. Chat models end a turn, not a document, with that one.

    Raises:
        ValueError: no such file, or not a tokenizer's; a folder without `tokenizer.json`; `eod` is not in the
            vocabulary, or none was found.
    """
    if source == BYTE:
        if eod is not None:
            raise ValueError(f"eod must be None with the byte tokenizer, which ends documents with id 256, got {eod!r}")
        return TextTokenizer(BYTE, BYTE_VOCABULARY, BYTE_VOCABULARY - 1, encode_bytes)
    path = Path(source)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"tokenizer must be 'byte', a tokenizer.json or a folder that holds one, got {source!r}")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no narrower class
        raise ValueError(f"tokenizer must be a tokenizer.json, got {file}: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # Text that happens to spell a special token stays text: only the writer ends documents.
    tokenizer.encode_special_tokens = True
    eod_id = _eod_id(tokenizer, eod, file)

    def encode(text: str) -> np.ndarray:
        return np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1  # the ids may have holes
    return TextTokenizer(str(source), vocab_size, eod_id, encode)


def train_tokenizer(
    documents: Iterable[str],
    vocab_size: int,
    folder: str | os.PathLike[str],
    *,
    min_frequency: int = 2,
    overwrite: bool = False,
    show_progress: bool = False,
) -> int:
    """Train byte-pair encoding over bytes, so that any text has tokens, and write it as Hugging Face's tokenizers do.

    `folder` gets tokenizer.json and tokenizer_config.json, which `load_tokenizer` and transformers read. Tokens are
    `<|endoftext|>` (id 0), the 256 bytes, and pieces of words in the order of their frequency; the same documents give
    the same file.

    Args:
        documents: texts to learn from.
        vocab_size: the most tokens to have, at least 257; a small corpus has fewer pairs to join.
        folder: is made.
        min_frequency: how often a pair has to occur to be joined.
        overwrite: whether an existing tokenizer.json may be replaced.
        show_progress: whether to show a bar.

    Returns:
        The number of tokens.

    Raises:
        ValueError: `vocab_size` below 257, `min_frequency` below 1, or no text in `documents`.
        FileExistsError: `folder` holds a tokenizer and `overwrite` is False.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    for name, value, least in (("vocab_size", vocab_size, len(alphabet) + 1), ("min_frequency", min_frequency, 1)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    target = Path(folder) / "tokenizer.json"
    if target.exists() and not overwrite:
        raise FileExistsError(f"folder must hold no tokenizer unless overwriting is asked for, got {target}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    seen = 0

    def texts() -> Iterable[str]:
        nonlocal seen
        for text in documents:
            seen += len(text)
            yield text

    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=min_frequency, special_tokens=[END_OF_DOCUMENT], initial_alphabet=alphabet,
        show_progress=show_progress,
    )  # fmt: skip
    tokenizer.train_from_iterator(texts(), trainer)
    if not seen:
        raise ValueError("documents must hold text, got none")
    target.parent.mkdir(parents=True, exist_ok=True)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_DOCUMENT}
    target.with_name("tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    part = target.with_name(".tokenizer.json")
    tokenizer.save(str(part))
    part.replace(target)
    return tokenizer.get_vocab_size()


def encode_bytes(text: str) -> np.ndarray:
    """The bytes of `text` in UTF-8, [T] uint8."""
    return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)


def _eod_id(tokenizer: Tokenizer, eod: str | None, file: Path) -> int:
    candidates = [eod] if eod is not None else [END_OF_DOCUMENT, _eos_token(file.with_name("tokenizer_config.json"))]
    for token in candidates:
        found = tokenizer.token_to_id(token) if token else None
        if found is not None:
            return found
    raise ValueError(f"eod must be a token of {file}, got {eod!r}; tried {[token for token in candidates if token]}")


def _eos_token(config: Path) -> str | None:
    if not config.is_file():
        return None
    token = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
    return token["content"] if isinstance(token, dict) else token

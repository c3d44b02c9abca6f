"""Tokenizers, sources of documents, and the writer of `.bin/.idx`."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from tokenizers import Tokenizer, models, pre_tokenizers

from qla_megatron.data.corpus import (
    jsonl_documents,
    read_info,
    stdlib_corpus,
    text_documents,
    text_files,
    write_corpus,
)
from qla_megatron.data.tokenize import load_tokenizer

TEXTS = ["one", "", "zwei – 2", "drei\n", "x" * 500, "\x00\x7f"]


def tokenizer_folder(folder: Path, size: int = 20, eod: str | None = "<|endoftext|>", eos: object = None) -> Path:
    """A word tokenizer of `size` words w0, w1, ..., with some special tokens and a template that would add one."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)} | {"[UNK]": size}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([token for token in (eod, "<|im_end|>") if token])
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8, pad_id=0)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if eos is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return folder


def contents(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset(str(prefix))
    return [dataset[i].tolist() for i in range(len(dataset))]


def test_bytes_come_back(tmp_path: Path) -> None:
    info = write_corpus(TEXTS, tmp_path / "new" / "c")
    documents = contents(tmp_path / "new" / "c")
    assert [bytes(d[:-1]).decode() for d in documents] == [text for text in TEXTS if text]
    assert {d[-1] for d in documents} == {256}
    assert (info.tokenizer, info.vocab_size, info.eod_id, info.dtype) == ("byte", 257, 256, "uint16")
    assert (info.documents, info.empty, info.tokens) == (5, 1, sum(map(len, documents)))
    assert (info.shortest, info.longest) == (3, 501)
    assert read_info(tmp_path / "new" / "c") == info


def test_document_boundaries_are_megatrons(tmp_path: Path) -> None:
    write_corpus(TEXTS, tmp_path / "c")
    dataset = IndexedDataset(str(tmp_path / "c"))
    assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))


def test_workers_change_nothing(tmp_path: Path) -> None:
    texts = [f"document {i} " * (i % 7) for i in range(100)]
    alone, many = write_corpus(texts, tmp_path / "a"), write_corpus(texts, tmp_path / "b", workers=2)
    assert alone == many
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()


def test_hugging_face_tokenizer(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "model")
    info = write_corpus(["w1 w2 w3 w4 w5", "w0 <|endoftext|> w3"], tmp_path / "c", str(folder))
    # 21 ends a document; the same words in a text are no such end, and neither truncation nor padding is left on
    assert contents(tmp_path / "c") == [[1, 2, 3, 4, 5, 21], [0, 20, 3, 21]]
    assert (info.vocab_size, info.eod_id) == (23, 21)
    assert load_tokenizer(str(folder / "tokenizer.json")).eod_id == 21


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "model", size=70_000)
    assert write_corpus(["w69999 w1"], tmp_path / "c", str(folder)).dtype == "int32"
    assert contents(tmp_path / "c") == [[69999, 1, 70001]]


@pytest.mark.parametrize("eos", ["<|im_end|>", {"content": "<|im_end|>"}])
def test_which_token_ends_a_document(tmp_path: Path, eos: object) -> None:
    both = str(tokenizer_folder(tmp_path / "both", eos=eos))
    assert load_tokenizer(both).eod_id == 21
    assert load_tokenizer(both, "<|im_end|>").eod_id == 22
    assert load_tokenizer(str(tokenizer_folder(tmp_path / "chat", eod=None, eos=eos))).eod_id == 21
    with pytest.raises(ValueError, match=r"eod must be a token of .*, got '<none>'"):
        load_tokenizer(both, "<none>")
    with pytest.raises(ValueError, match="eod must be a token of"):
        load_tokenizer(str(tokenizer_folder(tmp_path / "neither", eod=None)))


def test_tokenizer_errors(tmp_path: Path) -> None:
    for source in (str(tmp_path), str(tmp_path / "no.json"), "bytes"):
        with pytest.raises(ValueError, match="tokenizer must be 'byte'"):
            load_tokenizer(source)
    with pytest.raises(ValueError, match="eod must be None"):
        load_tokenizer("byte", "x")


def test_a_run_cut_short_leaves_nothing(tmp_path: Path) -> None:
    def documents() -> Iterator[str]:
        yield "some text"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_corpus(documents(), tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_existing_files_are_kept_unless_overwritten(tmp_path: Path) -> None:
    write_corpus(["first"], tmp_path / "c")
    before = (tmp_path / "c.bin").read_bytes()
    with pytest.raises(FileExistsError, match=r"got .*c\.bin"):
        write_corpus(["second"], tmp_path / "c")
    assert (tmp_path / "c.bin").read_bytes() == before
    write_corpus(["second"], tmp_path / "c", overwrite=True)
    assert bytes(contents(tmp_path / "c")[0][:-1]) == b"second"


def test_jsonl(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a", "body": "ä"}\n\n{"text": "b", "body": "c"}\n', encoding="utf-8")
    assert list(jsonl_documents([file])) == ["a", "b"]
    assert list(jsonl_documents([file, file], "body")) == ["ä", "c"] * 2
    for line in ("{", "[1]", '{"other": 1}', "3"):
        file.write_text('{"text": "a"}\n' + line + "\n")
        with pytest.raises(ValueError, match=r"a\.jsonl:2 must be a JSON object with a string under 'text'"):
            list(jsonl_documents([file]))
    file.write_text('{"text": 5}\n')
    with pytest.raises(ValueError, match=r"must be a JSON object with a string under 'text', got TypeError.*int"):
        list(jsonl_documents([file]))


def test_text_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "sub/c.txt", "sub/d.py", "e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    files = text_files([tmp_path], (".txt",))
    assert {file.name for file in files} == {"a.txt", "b.txt", "c.txt", "e.txt"}
    assert files == text_files([tmp_path / "sub", tmp_path, tmp_path / "a.txt"], (".txt",))
    assert len({tuple(text_files([tmp_path], seed=seed)) for seed in range(8)}) > 1
    assert set(text_documents(files)) == {"a.txt", "b.txt", "sub/c.txt", "e.txt"}
    (tmp_path / "b.txt").write_bytes(b"ok\xff")
    with pytest.raises(ValueError, match=r"b\.txt must be UTF-8 text, .* offset 2"):
        list(text_documents([tmp_path / "b.txt"]))
    with pytest.raises(ValueError, match="paths must exist"):
        text_files([tmp_path / "none"])
    with pytest.raises(ValueError, match="got none"):
        text_files([tmp_path], (".rs",))


def test_stdlib_corpus() -> None:
    documents = stdlib_corpus()
    assert documents == stdlib_corpus()
    assert documents != stdlib_corpus(seed=1)
    assert sorted(documents) == sorted(stdlib_corpus(seed=1))
    assert 5e6 < sum(map(len, documents)) < 20e6
    assert sum("class TestCase" in text for text in documents) < 5, "unittest itself, no tests"


def test_writer_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        write_corpus(["a"], tmp_path / "c", workers=0)
    with pytest.raises(ValueError, match="documents must hold text, got 2 empty ones"):
        write_corpus(["", ""], tmp_path / "c")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="prefix must name a dataset"):
        read_info(tmp_path / "c")
    (tmp_path / "c.json").write_text('{"documents": 3}')
    with pytest.raises(ValueError, match="must be a description of a dataset"):
        read_info(tmp_path / "c")


def test_ids_fit_the_type(tmp_path: Path) -> None:
    write_corpus(["\x00ÿ"], tmp_path / "c")
    assert contents(tmp_path / "c") == [[0, *np.frombuffer("ÿ".encode(), np.uint8).tolist(), 256]]

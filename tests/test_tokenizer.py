"""The tokenizer against ids that others computed, and on texts that nobody expects."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from irkit.errors import BadTypeError, BadValueError, ConfigError, CorruptError, StorageError
from irkit.tokenizer import Tokenizer

ODD = [
    "",
    " ",
    "\n\t",
    "👍🏽 emoji 👩‍👩‍👧",
    "Ünïcödé ﬁ ǅ",
    "日本語のテキスト",
    "a\0b",
    "[MASK] [SEP] <mask>",
    "naïve" * 40,
]


@pytest.fixture(scope="module")
def vocabularies(data_dir: Path) -> Path:
    return data_dir / "tokenizers"


@pytest.fixture(scope="module")
def passages(data_dir: Path) -> list[str]:
    with (data_dir / "msmarco-dl19-pool" / "corpus.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line, _ in zip(lines, range(300), strict=False)]


def ids(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [row.tolist() for row in tokenizer(texts)]


def without_json(folder: Path, target: Path, **configuration: object) -> Path:
    """A copy of a model directory as it was before tokenizer.json existed."""
    target.mkdir()
    for name in ("vocab.txt", "vocab.json", "merges.txt"):
        if (folder / name).exists():
            shutil.copy(folder / name, target / name)
    if configuration:
        (target / "tokenizer_config.json").write_text(json.dumps(configuration))
    return target


@pytest.mark.data
@pytest.mark.parametrize("only_vocabulary", [False, True])
def test_wordpiece_golden(vocabularies, data_dir, tmp_path, only_vocabulary):
    folder = vocabularies / "bert-base-uncased"
    tokenizer = Tokenizer.from_pretrained(without_json(folder, tmp_path / "v") if only_vocabulary else folder)
    lines = (data_dir / "golden/dl19.bert_wordpiece.tsv").read_text().splitlines()
    golden = dict(line.split("\t") for line in lines)
    with (data_dir / "msmarco-dl19-pool/queries.jsonl").open() as file:
        queries = {query["_id"]: query["text"] for query in map(json.loads, file)}
    assert len(golden) == 43
    for query_id, row in zip(golden, ids(tokenizer, [queries[key] for key in golden]), strict=True):
        pieces = [tokenizer.backend.id_to_token(number) for number in row]
        assert pieces == ["[CLS]", *golden[query_id].split(), "[SEP]"]


@pytest.mark.data
def test_modernbert_golden(vocabularies, data_dir):
    tokenizer = Tokenizer.from_pretrained(vocabularies / "modernbert-base")
    cases = json.loads((data_dir / "golden/modernbert_ids.json").read_text())["cases"]
    assert len(cases) == 53
    assert ids(tokenizer, [case["text"] for case in cases]) == [case["input_ids"] for case in cases]


@pytest.mark.data
@pytest.mark.parametrize("name", ["bert-base-uncased", "roberta-base"])
def test_a_vocabulary_alone_gives_the_same_ids(vocabularies, passages, tmp_path, name):
    texts = passages + ODD
    bare = Tokenizer.from_pretrained(without_json(vocabularies / name, tmp_path / "bare"))
    whole = Tokenizer.from_pretrained(vocabularies / name)
    assert ids(bare, texts) == ids(whole, texts)
    assert bare.special_ids == whole.special_ids
    bare.save(tmp_path / "saved")
    assert ids(Tokenizer.from_pretrained(tmp_path / "saved"), texts) == ids(whole, texts)


def words_only(tiny_bert: Path, target: Path, **configuration: object) -> Path:
    """A directory with the vocabulary of the tiny BERT in vocab.txt, and tokenizer_config.json."""
    numbers = json.loads((tiny_bert / "tokenizer.json").read_text())["model"]["vocab"]
    target.mkdir()
    (target / "vocab.txt").write_text("\n".join(sorted(numbers, key=numbers.__getitem__)) + "\n")
    (target / "tokenizer_config.json").write_text(json.dumps(configuration))
    return target


def test_only_classes_that_split_as_bert_are_read_as_such(tiny_bert, tmp_path):
    expected = ids(Tokenizer.from_pretrained(tiny_bert), ["the search"])
    for name in (None, "BertTokenizer", "DistilBertTokenizerFast"):
        folder = words_only(tiny_bert, tmp_path / str(name), tokenizer_class=name)
        assert ids(Tokenizer.from_pretrained(folder), ["the search"]) == expected
    japanese = {"tokenizer_class": "BertJapaneseTokenizer"}
    by_tokenizer = words_only(tiny_bert, tmp_path / "by_tokenizer", **japanese)
    by_model = words_only(tiny_bert, tmp_path / "by_model")
    (by_model / "config.json").write_text(json.dumps({"model_type": "bert", **japanese}))
    for folder in (by_tokenizer, by_model):
        with pytest.raises(ConfigError, match="loading the tokenizer of"):
            Tokenizer.from_pretrained(folder)


def test_added_tokens_beside_a_vocabulary(tiny_bert, tmp_path):
    size = Tokenizer.from_pretrained(tiny_bert).vocab_size
    described = {"content": "[D] ", "lstrip": False, "normalized": False, "rstrip": True, "special": True}
    folder = words_only(
        tiny_bert,
        tmp_path / "words",
        tokenizer_class="BertTokenizer",
        additional_special_tokens=["[Q]", {"content": "search", "lstrip": True}],
        added_tokens_decoder={str(size + 1): described},
    )
    (folder / "added_tokens.json").write_text(json.dumps({"of the": size + 2, "[Q]": size}))
    tokenizer = Tokenizer.from_pretrained(folder)
    tokenizer.save(tmp_path / "saved")
    search = tokenizer.ids(["search"])[0]
    for read in (tokenizer, Tokenizer.from_pretrained(tmp_path / "saved")):
        assert ids(read, ["[Q][D]  OF the search"]) == [[2, size, size + 1, size + 2, search, 3]]
        assert read.special_tokens() == [0, 1, 2, 3, 4, search, size, size + 1]
    (folder / "added_tokens.json").write_text(json.dumps({"of the": size + 7}))
    with pytest.raises(CorruptError, match=rf"'of the' has id {size + 1}, expected {size + 7}"):
        Tokenizer.from_pretrained(folder)


@pytest.mark.data
def test_added_tokens_beside_merges(vocabularies, tmp_path):
    added = {"50265": {"content": "<doc>", "special": True}}
    folder = without_json(vocabularies / "roberta-base", tmp_path / "merges", added_tokens_decoder=added)
    assert ids(Tokenizer.from_pretrained(folder), ["<doc>"]) == [[0, 50265, 2]]


@pytest.mark.data
def test_case_is_kept_where_the_configuration_says_so(vocabularies, tmp_path):
    folder = without_json(vocabularies / "bert-base-cased", tmp_path / "cased", do_lower_case=False)
    tokenizer = Tokenizer.from_pretrained(folder)
    pieces = [
        tokenizer.backend.id_to_token(number) for number in tokenizer(["Paris is Évian"]).values.tolist()
    ]
    assert pieces == ["[CLS]", "Paris", "is", "É", "##vian", "[SEP]"]


@pytest.mark.data
def test_tokenizer_config_overrules_the_normalizer(vocabularies, tmp_path):
    shutil.copy(vocabularies / "bert-base-uncased/tokenizer.json", tmp_path)
    lower = Tokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false, "strip_accents": false}')
    cased = Tokenizer.from_pretrained(tmp_path)
    assert lower(["PARIS"]).lengths.tolist() == [3]
    assert set(cased(["PARIS"]).values.tolist()) == {101, 100, 102}  # no capitals in this vocabulary


@pytest.mark.data
def test_sentence_transformers_can_ask_for_lower_case(vocabularies, tmp_path):
    shutil.copy(vocabularies / "roberta-base/tokenizer.json", tmp_path)
    plain = Tokenizer.from_pretrained(tmp_path)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 8, "do_lower_case": true}')
    lower = Tokenizer.from_pretrained(tmp_path)
    assert ids(lower, ["An ODD Text"]) == ids(plain, ["an odd text"]) != ids(plain, ["An ODD Text"])
    assert lower.do_lower_case
    assert lower.max_length == 8


@pytest.mark.parametrize(
    ("own", "tokenizer_limit", "positions", "expected"),
    [
        (None, 64, 64, 64),
        (None, 512, 514, 512),
        (None, 10**30, 512, 512),
        (None, None, None, None),
        (256, 512, 512, 256),
        (512, 64, 64, 512),  # sentence-transformers lets its own setting win; the model caps at its positions
        (None, None, -1, None),  # XLNet
    ],
)
def test_maximum_length(tiny_bert, tmp_path, own, tokenizer_limit, positions, expected):
    shutil.copy(tiny_bert / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": tokenizer_limit}))
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": positions}))
    if own:
        (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": own}))
    assert Tokenizer.from_pretrained(tmp_path).max_length == expected


@pytest.mark.parametrize("name", ["processor_kwargs", "tokenizer_args"])
def test_maximum_length_among_the_arguments_of_a_tokenizer(tiny_bert, tmp_path, name):
    """As in sentence-transformers, it counts before max_seq_length."""
    shutil.copy(tiny_bert / "tokenizer.json", tmp_path)
    file = tmp_path / "sentence_bert_config.json"
    file.write_text(json.dumps({"max_seq_length": 64, name: {"model_max_length": 16}}))
    assert Tokenizer.from_pretrained(tmp_path).max_length == 16
    file.write_text(json.dumps({"max_seq_length": 64, name: {}}))
    assert Tokenizer.from_pretrained(tmp_path).max_length == 64


def test_cut_text_keeps_its_special_tokens(tiny_bert):
    tokenizer = Tokenizer.from_pretrained(tiny_bert)
    rows = tokenizer(["a text", "x" * 50_000, "the index " * 5_000])
    assert rows.max_length == 64
    special = tokenizer.special_ids
    for row in rows:
        assert row[0] == special["cls"]
        assert row[-1] == special["sep"]
    tokenizer.max_length = 5
    assert tokenizer(["the index " * 9]).lengths.tolist() == [5]
    tokenizer.max_length = None
    assert tokenizer(["the index " * 500]).lengths.tolist() == [1002]
    with pytest.raises(BadValueError, match="no room beside 2 special tokens"):
        tokenizer.max_length = 2


def test_truncation_side(tiny_bert, tmp_path):
    shutil.copy(tiny_bert / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"truncation_side": "left", "model_max_length": 4}')
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    index = tokenizer.backend.token_to_id("index")
    assert tokenizer(["the search index"]).values.tolist()[-2] == index
    expected = ids(tokenizer, ["the search index"])
    tokenizer.lowercase()
    tokenizer.save(tmp_path / "saved")  # from memory
    assert ids(Tokenizer.from_pretrained(tmp_path / "saved"), ["the search index"]) == expected


def test_special_ids(tiny_bert, tmp_path):
    tokenizer = Tokenizer.from_pretrained(tiny_bert)
    assert tokenizer.special_ids == {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
    shutil.copy(tiny_bert / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        '{"mask_token": {"content": "index"}, "cls_token": "absent"}'
    )
    named = Tokenizer.from_pretrained(tmp_path)
    assert named.special_ids["mask"] == named.backend.token_to_id("index")
    assert "cls" not in named.special_ids


def test_nothing_in_nothing_out(tiny_bert):
    tokenizer = Tokenizer.from_pretrained(tiny_bert)
    rows = tokenizer([])
    assert len(rows) == 0
    assert rows.values.dtype == torch.int64
    assert tokenizer([""]).values.tolist() == [2, 3]


def test_half_a_surrogate_pair_becomes_the_replacement_character(tiny_bert):
    tokenizer = Tokenizer.from_pretrained(tiny_bert)
    broken = ["a \ud83d text", "whole \ud83d\ude00", "fine"]
    assert ids(tokenizer, broken) == ids(tokenizer, ["a � text", "whole 😀", "fine"])


@pytest.mark.parametrize("wrong", [None, 3, b"bytes", ("a", "pair"), ["nested"]])
def test_what_is_not_a_string_is_named(tiny_bert, wrong):
    tokenizer = Tokenizer.from_pretrained(tiny_bert)
    with pytest.raises(BadTypeError, match=f"text 1 is {type(wrong).__name__}"):
        tokenizer(["fine", wrong])


def test_one_string_is_not_a_list_of_letters(tiny_bert):
    with pytest.raises(BadTypeError, match=r"write \[text\]"):
        Tokenizer.from_pretrained(tiny_bert)("abc")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(max_size=40), max_size=6), st.sampled_from(["", "query: "]))
def test_a_text_does_not_depend_on_its_batch(tiny_bert, texts, prompt):
    tokenizer = Tokenizer.from_pretrained(tiny_bert)
    together = ids(tokenizer, [prompt + text for text in texts])
    assert [row.tolist() for row in tokenizer(texts, prompt)] == together
    assert [ids(tokenizer, [prompt + text])[0] for text in texts] == together


def test_prompt_length(tiny_bert):
    tokenizer = Tokenizer.from_pretrained(tiny_bert)
    assert tokenizer.prompt_length("") == 0
    assert tokenizer.prompt_length("search the index") == 4  # [CLS] and three words, not [SEP]


def test_save_writes_what_was_loaded(tiny_bert, tmp_path):
    copy = tmp_path / "copy"
    Tokenizer.from_pretrained(tiny_bert).save(copy)
    assert sorted(file.name for file in copy.iterdir()) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    for file in copy.iterdir():
        assert file.read_bytes() == (tiny_bert / file.name).read_bytes()


def test_damaged_and_missing_files(tmp_path):
    with pytest.raises(StorageError, match=r"neither tokenizer\.json nor a vocabulary"):
        Tokenizer.from_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("no special tokens\nhere\n")
    with pytest.raises(ConfigError, match="through transformers"):
        Tokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(CorruptError, match="loading the tokenizer"):
        Tokenizer.from_pretrained(tmp_path)


def test_an_end_that_only_code_of_the_model_adds(tiny_bert, tmp_path):
    """gte-Qwen2: its tokenizer.json lacks the end that its own tokenizer adds, where embeddings are read."""
    state = json.loads((tiny_bert / "tokenizer.json").read_text())
    code = {"auto_map": {"AutoTokenizer": ["tokenization_qwen.Qwen2Tokenizer", None]}}
    ends = {"add_eos_token": True, "eos_token": {"content": "[SEP]"}}

    def last(post_processor: object, **settings: object) -> list[str]:
        state["post_processor"] = post_processor
        (tmp_path / "tokenizer.json").write_text(json.dumps(state))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        tokenizer = Tokenizer.from_pretrained(tmp_path)
        tokenizer.max_length = 6
        rows = tokenizer(["the index", "the index " * 9])
        assert rows.lengths[1] == 6
        return [tokenizer.backend.id_to_token(row[-1]) for row in ids(tokenizer, ["the index", "index " * 9])]

    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    assert last(None, **ends, **code) == last(byte_level, **ends, **code) == ["[SEP]", "[SEP]"]
    assert last(None, **ends) == ["index", "index"]  # as transformers reads a tokenizer.json
    assert last(None, **ends | {"eos_token": "<none>"}, **code) == ["index", "index"]
    own = json.loads((tiny_bert / "tokenizer.json").read_text())["post_processor"]
    assert last(own, **ends, **code) == ["[SEP]", "[SEP]"]
    assert Tokenizer.from_pretrained(tmp_path)(["index"]).lengths.tolist() == [3]  # not twice


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    "name", ["LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "GemmaTokenizer"]
)
def test_an_end_that_transformers_added_before_version_5(tiny_bert, tmp_path, name, inside):
    """E5-Mistral: tokenizer.json adds the first token alone, and vectors are read from the end token."""
    state = json.loads((tiny_bert / "tokenizer.json").read_text())
    first = {"SpecialToken": {"id": "[CLS]", "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [first, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [2], "tokens": ["[CLS]"]}},
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    nested = {"type": "Sequence", "processors": [byte_level, template]}
    state["post_processor"] = nested if inside else template
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))

    def tokens(**settings: object) -> list[str]:
        config = {"tokenizer_class": name, "eos_token": "[SEP]", **settings}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = Tokenizer.from_pretrained(tmp_path)
        tokenizer.max_length = 4
        return [tokenizer.backend.id_to_token(number) for number in ids(tokenizer, ["the index " * 4])[0]]

    ended, plain = ["[CLS]", "the", "index", "[SEP]"], ["[CLS]", "the", "index", "the"]
    assert tokens(add_eos_token=True) == ended
    loaded = Tokenizer.from_pretrained(tmp_path)
    assert loaded.backend.encode("the", "index").tokens == ["[CLS]", "the", "[SEP]", "index", "[SEP]"]
    loaded.save(tmp_path / "again")
    assert ids(Tokenizer.from_pretrained(tmp_path / "again"), ["the"]) == ids(loaded, ["the"])
    assert tokens() == tokens(add_eos_token=False) == plain
    assert tokens(add_eos_token=True, tokenizer_class="PreTrainedTokenizerFast") == plain  # as transformers


def test_transformers_is_the_last_resort(tmp_path):
    letters = {letter: number for number, letter in enumerate("abcdefgh<>|")}
    (tmp_path / "vocab.json").write_text(json.dumps(letters | {"ab": 11, "<|endoftext|>": 12}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "GPT2Tokenizer", "model_max_length": 4}'
    )
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert ids(tokenizer, ["abcabcabc"]) == [[11, 2, 11, 2]]


def test_forking_after_use_is_silent_and_safe(tiny_bert, capfd):
    tokenizer = Tokenizer.from_pretrained(tiny_bert)
    expected = ids(tokenizer, ["a text"] * 100)
    child = os.fork()
    if child == 0:
        os._exit(0 if ids(tokenizer, ["a text"] * 100) == expected else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert capfd.readouterr().err == ""


def test_a_marker_takes_no_id_of_a_vocabulary_with_a_gap(gapped_bert: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(gapped_bert)
    with pytest.raises(CorruptError, match=r"'\[Q\] ' to .*: it gets the id of another one"):
        tokenizer.add_marker("[Q] ")

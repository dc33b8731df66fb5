"""Tokenizers: one BOS, every end token, padding that may equal the end token, templates."""

import json

import numpy as np
import pytest

from grpo_jax.data import tokenizer as tokenizers
from grpo_jax.data.tokenizer import ByteTokenizer, HFTokenizer, TokenizerConfig, load_tokenizer

TEMPLATE = (
    "<bos>{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TALK = [
    {"role": "user", "content": "hi there"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "hi"},
]


def make_folder(path, *, template=TEMPLATE, pad=None, adds_bos=True, generation_eos=None):
    """Write a word-level tokenizer folder that puts BOS in front by itself."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

    words = "<unk> <eos> <bos> <turn> user assistant : hi there hello x".split()
    words += ["\n", " ", ": "]
    built = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s|\w+|:"), behavior="isolated")
    built.add_special_tokens(["<eos>", "<bos>", "<turn>"])
    if adds_bos:
        built.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 2)]
        )
    built.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    settings |= {"bos_token": "<bos>", "eos_token": "<eos>"}
    if template:
        settings["chat_template"] = template
    if pad:
        settings["pad_token"] = pad
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    if generation_eos is not None:
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("tokenizer"), generation_eos=[1, 3])


@pytest.fixture(scope="module")
def words(folder):
    return load_tokenizer(TokenizerConfig(), folder)


def test_a31_plain_text_begins_with_exactly_one_bos(words):
    assert words.encode("hi there")[:2] == [2, 7]
    assert words.encode("<bos>hi there")[:2] == [2, 7]


def test_a31_a_template_that_writes_bos_gets_no_second_one(words):
    ids = words.encode_chat(TALK)
    assert ids[0] == 2
    assert ids.count(2) == 1


def test_a31_a_tokenizer_without_automatic_bos_gets_none(tmp_path):
    plain = HFTokenizer(make_folder(tmp_path, adds_bos=False))
    assert plain.encode("hi")[:1] == [7]
    assert plain.encode_chat(TALK).count(2) == 1


def test_a33_messages_concatenate_to_the_template_and_end_with_one_eos(words):
    pieces = words.message_ids(TALK)
    whole = words._raw_ids(words.render(TALK, add_generation_prompt=False))
    assert sum(pieces, []) == whole
    assert whole.count(1) == len(TALK)  # one end token a message, the newline after it kept
    assert pieces[-1][-2:] == [1, 11]  # "<eos>", then the template's newline


def test_a33_a_template_that_rewrites_history_is_refused(tmp_path):
    rewriting = (
        "{% for m in messages %}{% if loop.last %}last: {% endif %}{{ m.content }}{% endfor %}"
    )
    tokenizer = HFTokenizer(make_folder(tmp_path, template=rewriting))
    with pytest.raises(ValueError, match="rewrites message 0 when later messages follow"):
        tokenizer.message_ids(TALK)


def test_stop_ids_join_tokenizer_generation_config_and_config(folder):
    assert load_tokenizer(TokenizerConfig(), folder).stop_ids == (1, 3)
    assert load_tokenizer(TokenizerConfig(stop_tokens=("x",)), folder).stop_ids == (1, 3, 10)


def test_an_unknown_stop_token_is_named(folder):
    with pytest.raises(ValueError, match="'<|im_end|>', which is not a token of"):
        load_tokenizer(TokenizerConfig(stop_tokens=("<|im_end|>",)), folder)


def test_padding_falls_back_to_the_end_token_without_growing_the_vocabulary(words):
    assert words.pad_id == words.eos_id == 1
    assert words.vocab_size == 14


def test_a_missing_chat_template_says_the_way_out(tmp_path):
    bare = HFTokenizer(make_folder(tmp_path, template=None))
    assert not bare.has_chat_template
    with pytest.raises(ValueError, match="has no chat template.*data.chat to false"):
        bare.encode_chat(TALK)


def test_a_chat_template_can_be_given_inline_or_as_a_file(tmp_path, folder):
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages[0].content }}!")
    for given in (str(file), file.read_text()):
        tokenizer = load_tokenizer(TokenizerConfig(chat_template=given), folder)
        assert tokenizer.render(TALK) == "hi there!"
    with pytest.raises(ValueError, match="neither a Jinja template nor a file"):
        load_tokenizer(TokenizerConfig(chat_template="missing.jinja"), folder)


def test_no_folder_and_no_tokenizer_are_named(tmp_path):
    with pytest.raises(ValueError, match="no tokenizer folder at .*nowhere"):
        load_tokenizer(TokenizerConfig(), "nowhere")
    with pytest.raises(ValueError, match="no tokenizer folder"):
        load_tokenizer(TokenizerConfig())
    with pytest.raises(ValueError, match="holds no tokenizer that transformers can read"):
        load_tokenizer(TokenizerConfig(), tmp_path)


def test_saving_gives_a_folder_that_reads_back(words, tmp_path):
    words.save(tmp_path)
    again = load_tokenizer(TokenizerConfig(), tmp_path)
    assert again.encode_chat(TALK) == words.encode_chat(TALK)
    assert again.render(TALK) == words.render(TALK)


def test_bytes_round_trip_with_special_tokens():
    tokenizer = load_tokenizer(TokenizerConfig(path="bytes"))
    assert isinstance(tokenizer, ByteTokenizer)
    text = "Grüße, 世界\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<|bos|>a") == [257, 97]
    ids = tokenizer.encode_chat(TALK)
    assert tokenizer.decode(ids, skip_special=False) == tokenizer.render(TALK)
    assert ids.count(tokenizer.eos_id) == 3 and max(ids) < tokenizer.vocab_size
    assert sum(tokenizer.message_ids(TALK), []) == tokenizer._raw_ids(tokenizer.render(TALK, False))


def test_rows_decode_together_as_they_do_alone(words):
    for tokenizer in (words, ByteTokenizer()):
        rows = [tokenizer.encode_chat(TALK), tokenizer.encode("hi"), []]
        for skip in (True, False):
            alone = [tokenizer.decode(row, skip) for row in rows]
            assert tokenizer.decode_batch(rows, skip) == alone


def test_byte_tokenizer_saves_a_marker(tmp_path):
    ByteTokenizer().save(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"]


def test_both_tokenizers_offer_the_whole_interface(words):
    names = set(tokenizers.Tokenizer.__annotations__) | {
        name for name in vars(tokenizers.Tokenizer) if not name.startswith("_")
    }
    for tokenizer in (words, ByteTokenizer()):
        assert not [name for name in names if not hasattr(tokenizer, name)]


def test_models_with_other_token_ids_are_told_apart(words, tmp_path):
    """The same tokens pass, more tokens pass, one token with another id does not."""
    same, other = tmp_path / "same", tmp_path / "other"
    for folder in (same, other):
        folder.mkdir()
    tokenizers.check_same_ids(words, make_folder(same, template=None), "teacher.path")
    text = (make_folder(other) / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"hello": 9', '"hello": 10, "more": 9'))
    with pytest.raises(ValueError, match=r"teacher.path = .*'hello' is 10 there and 9 here"):
        tokenizers.check_same_ids(words, other, "teacher.path")
    with pytest.raises(ValueError, match="holds no tokenizer"):
        tokenizers.check_same_ids(words, tmp_path, "teacher.path")
    tokenizers.check_same_ids(ByteTokenizer(), tmp_path, "teacher.path")


def make_pieces(path, kind):
    """A trained tokenizer of a few hundred pieces: bytes as GPT-2 has them, or with a leading ▁."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    built = Tokenizer(models.BPE())
    if kind == "byte_level":
        built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        built.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        built.pre_tokenizer = pre_tokenizers.Metaspace()
        built.decoder = decoders.Metaspace()
        alphabet = sorted(set("".join(TEXTS)))
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False
    )
    built.train_from_iterator(TEXTS, trainer)
    built.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return HFTokenizer(path)


TEXTS = ["plain words, words 12 + 3", "smörgåsbord 日本語 🙂 end", "two  spaces"]


@pytest.mark.parametrize("kind", ["bytes", "byte_level", "metaspace"])
def test_offsets_cover_the_text_in_order(kind, tmp_path):
    byte = ByteTokenizer()
    tokenizer = byte if kind == "bytes" else make_pieces(tmp_path, kind)
    for text in TEXTS:
        ids = [*tokenizer.encode(text), *tokenizer.stop_ids]
        decoded, offsets = tokenizer.decode(ids), tokenizers.token_offsets(tokenizer, ids)
        assert decoded == text
        assert offsets[-1].tolist() == [len(text), len(text)]  # the end token has no text
        covered = {c for start, end in offsets for c in range(start, end)}
        assert covered == set(range(len(text)))
        assert (np.diff(offsets, axis=0) >= 0).all()
        pieces = [text[start:end] for start, end in offsets]
        alone = tokenizers.token_texts(tokenizer, ids, skip_special=True)
        for piece, single in zip(pieces, alone, strict=True):
            assert "\ufffd" in single or piece.strip() == single.strip()


def test_tokens_that_share_a_character_both_have_it():
    byte = ByteTokenizer()
    ids = [*byte.encode("aé")[1:], 259]
    assert tokenizers.token_offsets(byte, ids).tolist() == [[0, 1], [1, 2], [1, 2], [2, 2]]
    assert tokenizers.token_offsets(byte, ids[:2]).tolist() == [[0, 1], [1, 2]]  # cut: one U+FFFD
    assert tokenizers.token_offsets(byte, []).shape == (0, 2)


def test_token_texts_are_those_of_single_tokens():
    byte = ByteTokenizer()
    assert tokenizers.token_texts(byte, [98, 259, 97, 98]) == ["b", "<|im_end|>", "a", "b"]
    assert tokenizers.token_texts(byte, []) == []

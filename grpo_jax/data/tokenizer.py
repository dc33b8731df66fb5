"""Text in, token ids out: one small interface over Hugging Face tokenizers and a byte tokenizer.

Ids are only ever text: which tokens are trained is decided by lengths, never by comparing ids, so
a tokenizer whose padding equals its end token loses nothing.
"""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Message = dict[str, str]  # {"role": "user", "content": "..."}


@dataclasses.dataclass(frozen=True)
class TokenizerConfig:
    """Where the tokenizer comes from, and what ends a turn."""

    path: str | None = None  # folder; null = the model's folder; "bytes" = the byte tokenizer
    chat_template: str | None = None  # a Jinja template or a file holding one; null = the folder's
    stop_tokens: tuple[str, ...] = ()  # further tokens that end a completion, e.g. <|im_end|>


class Tokenizer(Protocol):
    """What the rest of the program needs from a tokenizer."""

    vocab_size: int  # ids are in [0, vocab_size)
    pad_id: int
    bos_id: int | None
    eos_id: int | None
    stop_ids: tuple[int, ...]  # any of these ends a completion; sorted
    has_chat_template: bool

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text, beginning with one BOS where the model wants one."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special: bool = True) -> str:
        """Return the text of ids."""
        ...

    def decode_batch(
        self, rows: Sequence[Sequence[int] | np.ndarray], skip_special: bool = True
    ) -> list[str]:
        """Return the text of each row of ids."""
        ...

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Return the chat template's text for a conversation."""
        ...

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a conversation, ready for the assistant to answer."""
        ...

    def message_ids(self, messages: Sequence[Message]) -> list[list[int]]:
        """Return the ids of each message; concatenated they are the ids of the conversation."""
        ...

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer's files into a model folder."""
        ...


def load_tokenizer(config: TokenizerConfig, model_path: str | Path | None = None) -> Tokenizer:
    """Build the tokenizer that `config` names, or the one in the model's folder.

    Raises:
        ValueError: no folder, a folder without a tokenizer, or an unknown stop token.
    """
    if config.path == "bytes":
        return ByteTokenizer()
    path = Path(config.path or model_path or "")
    if not (config.path or model_path) or not path.is_dir():
        raise ValueError(
            f"no tokenizer folder at {str(path)!r}; set tokenizer.path (or model.path) to a folder "
            'with tokenizer files, or tokenizer.path to "bytes"'
        )
    return HFTokenizer(path, config)


def check_same_ids(tokenizer: Tokenizer, folder: str | Path, what: str) -> None:
    """Refuse a model that was trained with other token ids than those of `tokenizer`.

    Args:
      tokenizer: whose ids the model will read.
      folder: of the model; not looked at for the byte tokenizer, which has no files.
      what: the key that names the folder, for the message.

    Raises:
      ValueError: the folder holds no tokenizer, or one that gives some token another id.
    """
    if not isinstance(tokenizer, HFTokenizer):
        return
    theirs = HFTokenizer(folder).vocabulary()
    other = {token for token, i in tokenizer.vocabulary().items() if theirs.get(token) != i}
    if other:
        token = min(other)
        raise ValueError(
            f"{what} = {str(folder)!r} has another tokenizer: {len(other)} of its ids differ, e.g. "
            f"{token!r} is {theirs.get(token)} there and {tokenizer.vocabulary()[token]} here; "
            "use models that share one tokenizer"
        )


class HFTokenizer:
    """A Hugging Face tokenizer folder, read without the network and without torch."""

    def __init__(self, path: str | Path, config: TokenizerConfig | None = None):
        config = config or TokenizerConfig()
        # Without torch, transformers would advise to install it; a tokenizer does not need it.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        from transformers import AutoTokenizer  # here: importing it takes seconds

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{str(path)!r} holds no tokenizer that transformers can read ({error}); it needs "
                "tokenizer.json or the model's own tokenizer files"
            ) from error
        self._path = str(path)
        if config.chat_template is not None:
            self._tokenizer.chat_template = _read_template(config.chat_template)
        self.has_chat_template = bool(self._tokenizer.chat_template)
        self.vocab_size = len(self._tokenizer)
        self.bos_id = self._tokenizer.bos_token_id
        self.eos_id = self._tokenizer.eos_token_id
        self.stop_ids = self._find_stop_ids(Path(path), config.stop_tokens)
        # No token is ever added: that would change the vocabulary under the model's feet.
        pad = self._tokenizer.pad_token_id
        self.pad_id = pad if pad is not None else self.eos_id if self.eos_id is not None else 0
        # Asked of the tokenizer itself, since add_bos_token is not kept in step with what it does.
        probe = self._tokenizer("a").input_ids
        self._adds_bos = self.bos_id is not None and probe[:1] == [self.bos_id]

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text, beginning with one BOS where the model wants one."""
        ids = self._raw_ids(text)
        return [self.bos_id, *ids] if self._adds_bos and ids[:1] != [self.bos_id] else ids

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special: bool = True) -> str:
        """Return the text of ids, exactly as the tokens spell it."""
        return self._tokenizer.decode(
            np.asarray(ids).tolist(),
            skip_special_tokens=skip_special,
            clean_up_tokenization_spaces=False,
        )

    def decode_batch(
        self, rows: Sequence[Sequence[int] | np.ndarray], skip_special: bool = True
    ) -> list[str]:
        """Return the text of each row of ids."""
        lists = [np.asarray(row).tolist() for row in rows]
        if self._tokenizer.is_fast:  # all rows in one call into Rust
            backend = self._tokenizer.backend_tokenizer
            return backend.decode_batch(lists, skip_special_tokens=skip_special)
        return [self.decode(row, skip_special) for row in lists]

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Return the chat template's text for a conversation."""
        if not self.has_chat_template:
            raise ValueError(
                f"the tokenizer in {self._path!r} has no chat template, which data.chat needs; set "
                "tokenizer.chat_template to a Jinja template (or a file holding one), or data.chat "
                "to false for plain-text prompts"
            )
        return self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a conversation, ready for the assistant to answer."""
        # The template writes its own BOS, so none is added.
        return self._raw_ids(self.render(messages))

    def message_ids(self, messages: Sequence[Message]) -> list[list[int]]:
        """Return the ids of each message; concatenated they are the ids of the conversation.

        The whole conversation is tokenised once and cut where the messages end in the text, so
        nothing a template puts after an end token (a newline, say) is lost or added twice.
        """
        whole = self.render(messages, add_generation_prompt=False)
        ends = _message_ends(self, messages, whole)
        encoded = self._tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        return _cut(encoded.input_ids, [start for start, _ in encoded.offset_mapping], ends)

    def vocabulary(self) -> dict[str, int]:
        """Return the id of every token, special ones included."""
        return dict(self._tokenizer.get_vocab())

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer's files into a model folder."""
        self._tokenizer.save_pretrained(str(folder))

    def _raw_ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)

    def _find_stop_ids(self, path: Path, extra: tuple[str, ...]) -> tuple[int, ...]:
        """Join the end tokens of the tokenizer, of the generation config and of our config."""
        found = set() if self.eos_id is None else {int(self.eos_id)}
        generation_config = path / "generation_config.json"
        if generation_config.is_file():
            ids = json.loads(generation_config.read_text()).get("eos_token_id")
            found |= {int(i) for i in (ids if isinstance(ids, list) else [ids]) if i is not None}
        vocabulary = self._tokenizer.get_vocab() if extra else {}
        for token in extra:
            if token not in vocabulary:
                raise ValueError(
                    f"tokenizer.stop_tokens names {token!r}, which is not a token of "
                    f"{self._path!r}; use tokens of its vocabulary, such as its special tokens "
                    f"{self._tokenizer.all_special_tokens}"
                )
            found.add(int(vocabulary[token]))
        return tuple(sorted(found))


class ByteTokenizer:
    """Bytes as tokens, for tests, documentation and models trained from scratch.

    Ids 0–255 are bytes; then come padding, BOS, `<|im_start|>` and `<|im_end|>` (the end token).
    """

    pad_id = 256
    bos_id: int | None = 257
    eos_id: int | None = 259
    stop_ids: tuple[int, ...] = (259,)
    vocab_size = 260
    has_chat_template = True
    _SPECIAL = {256: "<|pad|>", 257: "<|bos|>", 258: "<|im_start|>", 259: "<|im_end|>"}

    def encode(self, text: str) -> list[int]:
        """Return one BOS and the text's bytes."""
        ids = self._raw_ids(text)
        return ids if ids[:1] == [self.bos_id] else [257, *ids]

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special: bool = True) -> str:
        """Return the text of ids; bytes that are not UTF-8 become U+FFFD."""
        out = bytearray()
        for i in ids:
            if int(i) < 256:
                out.append(int(i))
            elif not skip_special:
                out += self._SPECIAL.get(int(i), "\ufffd").encode()  # a vocabulary may be padded
        return out.decode("utf-8", errors="replace")

    def decode_batch(
        self, rows: Sequence[Sequence[int] | np.ndarray], skip_special: bool = True
    ) -> list[str]:
        """Return the text of each row of ids."""
        return [self.decode(list(map(int, row)), skip_special) for row in rows]

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Return `<|im_start|>role\\ncontent<|im_end|>\\n` for each message."""
        turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
        return "".join(turns) + ("<|im_start|>assistant\n" if add_generation_prompt else "")

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a conversation, ready for the assistant to answer."""
        return self._raw_ids(self.render(messages))

    def message_ids(self, messages: Sequence[Message]) -> list[list[int]]:
        """Return the ids of each message; concatenated they are the ids of the conversation."""
        return [self._raw_ids(self.render([m], add_generation_prompt=False)) for m in messages]

    def save(self, folder: str | Path) -> None:
        """Write a marker: this tokenizer has no files."""
        path = Path(folder) / "tokenizer_config.json"
        path.write_text(json.dumps({"tokenizer_class": "ByteTokenizer"}) + "\n")

    def _raw_ids(self, text: str) -> list[int]:
        ids, i = [], 0
        marks = [(mark, token) for token, mark in self._SPECIAL.items()]
        while i < len(text):
            hit = next(((m, t) for m, t in marks if text.startswith(m, i)), None)
            if hit is None:
                ids.extend(text[i].encode())
                i += 1
            else:
                ids.append(hit[1])
                i += len(hit[0])
        return ids


def _read_template(template: str) -> str:
    """Return a template given inline (it has Jinja braces) or as the path of a file."""
    if "{" in template:
        return template
    if not Path(template).is_file():
        raise ValueError(
            f"tokenizer.chat_template {template!r} is neither a Jinja template nor a file; give "
            "the template itself or the path of a .jinja file"
        )
    return Path(template).read_text()


def _message_ends(tokenizer: Tokenizer, messages: Sequence[Message], whole: str) -> list[int]:
    """Characters of `whole` up to the end of each message."""
    ends = []
    for count in range(1, len(messages) + 1):
        text = tokenizer.render(messages[:count], add_generation_prompt=False)
        if not whole.startswith(text):
            raise ValueError(
                f"the chat template rewrites message {count - 1} when later messages follow, so "
                "its tokens cannot be told apart; use a template that only appends"
            )
        ends.append(len(text))
    return ends


def _cut(ids: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> list[list[int]]:
    """Split ids into one list per message, by the character at which each token starts."""
    out: list[list[int]] = [[] for _ in ends]
    message = 0
    for token, start in zip(ids, starts, strict=True):
        while start >= ends[message]:
            message += 1
        out[message].append(token)
    return out


def token_texts(
    tokenizer: Tokenizer, ids: Sequence[int] | np.ndarray, *, skip_special: bool = False
) -> list[str]:
    """Return the text of each token by itself; part of a character becomes U+FFFD."""
    distinct, inverse = np.unique(np.asarray(ids, np.int64), return_inverse=True)
    texts = tokenizer.decode_batch([[i] for i in distinct.tolist()], skip_special)
    return [texts[i] for i in inverse]


def token_offsets(tokenizer: Tokenizer, ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Say which characters of `decode(ids)` each token spells: first and one past the last.

    Tokens that share one character (its UTF-8 bytes) both have it. Tokens without text, such as
    the end token, have none: first = last.

    Returns:
      i64[n, 2].
    """
    texts = token_texts(tokenizer, ids, skip_special=True)
    if "".join(texts) == tokenizer.decode(ids):
        ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
        return np.stack([ends - [len(text) for text in texts], ends], axis=1).reshape(-1, 2)
    return _offsets_in_context(tokenizer, np.asarray(ids))


def _offsets_in_context(tokenizer: Tokenizer, ids: np.ndarray) -> np.ndarray:
    """`token_offsets` where a token's text depends on those before it, or is part of a character.

    Each token is decoded after the ones that made the last whole character, so that the work is
    linear in their number; what is new in the text is the token's. Unfinished characters wait.
    """
    offsets = np.zeros((len(ids), 2), np.int64)
    context = read = done = 0  # tokens before `read` have spelt `done` characters
    for i in range(len(ids)):
        before = tokenizer.decode(ids[context:read])
        after = tokenizer.decode(ids[context : i + 1])
        if after.endswith("\ufffd") and i + 1 < len(ids):
            continue  # the next token may complete the character
        end = done + max(len(after) - len(before), 0)
        offsets[read : i + 1] = done, end
        if end > done:
            context = read
        read, done = i + 1, end
    return offsets

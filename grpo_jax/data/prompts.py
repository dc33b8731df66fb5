"""Prompts: where text comes in, which rows are held out, and in which order they are served.

Symbols: `P` prompts a batch, `G` completions a prompt, `n` prompts of the training set. Free of
JAX, so that reward workers can unpickle an `Example` cheaply.
"""

import dataclasses
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np

from grpo_jax.data import tokenizer as tokenizers

Item = TypeVar("Item")
MASK_SAMPLE = "mask_sample"  # field of a row; true = sample and score it, but do not train it


@dataclasses.dataclass(frozen=True)
class PromptConfig:
    """Where prompts come from and how they are put to the model."""

    # where prompts come from: reasoning_gym, jsonl or datasets
    source: Literal["reasoning_gym", "jsonl", "datasets"] = "reasoning_gym"
    name: str = "chain_sum"  # reasoning_gym task, or name (or folder) for the datasets library
    params: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the reasoning_gym task
    size: int = 1000  # training prompts to generate (reasoning_gym)
    path: str | None = None  # JSONL file of training rows
    eval_path: str | None = None  # JSONL file of held-out rows; null = held out of `path`
    subset: str | None = None  # configuration name (datasets)
    split: str = "train"  # split of training rows (datasets)
    eval_split: str | None = None  # split of held-out rows; null = held out of `split` (datasets)
    prompt_field: str = "prompt"  # field holding text, or a list of messages
    answer_field: str = "answer"  # field holding the reference answer; may be missing
    eval_size: int = 64  # held-out prompts; no training prompt equals any of them
    system_prompt: str | None = None  # put before conversations that have none
    template: str = "{prompt}"  # put around every prompt's text
    chat: bool = True  # use the tokenizer's chat template; false = plain text
    max_prompt_tokens: int = 512  # chat template included
    too_long: Literal["skip", "error"] = "skip"  # what happens to a longer prompt; never cut
    remainder: Literal["drop", "carry"] = "drop"  # rows that do not fill a batch at an epoch's end
    seed: int = 0  # decides the tasks, the held-out rows and the order of every epoch

    def __post_init__(self):
        for key, least in (("size", 1), ("eval_size", 0), ("max_prompt_tokens", 1), ("seed", 0)):
            if getattr(self, key) < least:
                raise ValueError(
                    f"{key} = {getattr(self, key)} is below {least}; use at least that"
                )
        if "{prompt}" not in self.template:
            raise ValueError(
                f"template = {self.template!r} has no {{prompt}} in it, so every prompt would be "
                "the same; put {prompt} where the prompt's text goes"
            )
        if self.source == "jsonl" and self.path is None:
            raise ValueError('source = "jsonl" needs path; set path to a file of JSON lines')


@dataclasses.dataclass(frozen=True)
class Example:
    """One task: what is asked, the reference answer, and whatever its verifier needs."""

    prompt: str | tuple[tokenizers.Message, ...]
    answer: Any = None
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    index: int = 0  # row of its source


class Prompt(NamedTuple):
    """An example together with the ids that the model reads."""

    example: Example
    ids: np.ndarray  # i32[length]
    text: str  # exactly what was tokenised


class PromptSets(NamedTuple):
    """Training and held-out prompts, with what was left out on the way."""

    train: list[Prompt]
    held_out: list[Prompt]
    too_long: int  # prompts above max_prompt_tokens, skipped
    overlapping: int  # training rows removed because a held-out prompt is the same


def load_prompts(config: PromptConfig, tokenizer: tokenizers.Tokenizer) -> PromptSets:
    """Read, split and tokenise the prompts that `config` names.

    Raises:
        ValueError: unknown source, task, subset or field; an empty set; with `too_long="error"`, a
            prompt above the limit.
    """
    train, held_out = load_examples(config)
    train, long_train = _encode_all(train, tokenizer, config)
    held_out, long_held_out = _encode_all(held_out, tokenizer, config)
    seen = {prompt.text for prompt in held_out}
    kept = [prompt for prompt in train if prompt.text not in seen]
    if not kept:
        raise ValueError(
            f"no training prompt is left of {len(train) + long_train}: {long_train} above "
            f"max_prompt_tokens={config.max_prompt_tokens}, {len(train)} equal to a held-out "
            "prompt; raise the limit, lower eval_size, or use a larger dataset"
        )
    return PromptSets(kept, held_out, long_train + long_held_out, len(train) - len(kept))


def load_examples(config: PromptConfig) -> tuple[list[Example], list[Example]]:
    """Return training and held-out examples, which share no row of the source."""
    if config.source == "reasoning_gym":
        examples, separate = _read_reasoning_gym(config), None
    elif config.source == "jsonl":
        examples = _read_jsonl(str(config.path), config)
        separate = _read_jsonl(config.eval_path, config) if config.eval_path else None
    else:
        examples = _read_datasets(config, config.split)
        separate = _read_datasets(config, config.eval_split) if config.eval_split else None
    if not examples:
        where = config.path if config.source == "jsonl" else config.name
        raise ValueError(
            f"the {config.source} dataset {where!r} is empty; it needs at least one row"
        )
    pool = separate if separate is not None else examples
    order = np.random.default_rng([config.seed, 1]).permutation(len(pool))
    held_out = [pool[i] for i in order[: config.eval_size]]
    if separate is not None:
        return examples, held_out
    chosen = set(order[: config.eval_size].tolist())
    train = [example for i, example in enumerate(examples) if i not in chosen]
    if not train:
        raise ValueError(
            f"eval_size = {config.eval_size} holds out all {len(examples)} rows; lower eval_size"
        )
    return train, held_out


def encode_prompt(
    example: Example, tokenizer: tokenizers.Tokenizer, config: PromptConfig
) -> Prompt:
    """Put system prompt, template and chat template around an example, and tokenise it."""
    if isinstance(example.prompt, str):
        content = config.template.replace("{prompt}", example.prompt)
        messages: list[tokenizers.Message] = [{"role": "user", "content": content}]
    else:
        messages = [dict(message) for message in example.prompt]
    if config.system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": config.system_prompt}, *messages]
    if config.chat:
        text = tokenizer.render(messages)
        ids = tokenizer.encode_chat(messages)
    else:
        text = "\n\n".join(message["content"] for message in messages)
        ids = tokenizer.encode(text)
    if not ids:
        raise ValueError(
            f"row {example.index} gives a prompt of no tokens, and a completion needs something to "
            "follow; remove the row or set data.template"
        )
    return Prompt(example, np.asarray(ids, np.int32), text)


def repeat_prompts(prompts: Sequence[Item], completions: int) -> tuple[list[Item], np.ndarray]:
    """Repeat each prompt `G` times in a row; return the rows and their group ids i32[P·G].

    This is the only place where the number of completions multiplies anything.
    """
    rows = [prompt for prompt in prompts for _ in range(completions)]
    return rows, np.repeat(np.arange(len(prompts), dtype=np.int32), completions)


class PromptStream(Generic[Item]):
    """Serve batches of `P` items for ever, in an order decided by (seed, epoch) alone.

    The position is two integers, so a resumed run sees exactly the items that the uninterrupted one
    would have seen. Every process computes the same global order and takes its own slice.
    """

    def __init__(
        self,
        items: Sequence[Item],
        batch_size: int,
        *,
        seed: int = 0,
        remainder: Literal["drop", "carry"] = "drop",
        process_index: int = 0,
        process_count: int = 1,
    ):
        if not items:
            raise ValueError("the stream has no prompts; it needs at least one")
        if remainder == "drop" and len(items) < batch_size:
            raise ValueError(
                f"{len(items)} prompts do not fill one batch of {batch_size}; lower "
                'prompts_per_step, add prompts, or set data.remainder to "carry"'
            )
        if batch_size < 1 or batch_size % process_count:
            raise ValueError(
                f"a batch of {batch_size} prompts does not divide over {process_count} processes; "
                f"use a positive multiple of {process_count}"
            )
        self._items, self._batch_size, self._seed = items, batch_size, seed
        self._carry = remainder == "carry"
        share = batch_size // process_count
        self._mine = slice(process_index * share, (process_index + 1) * share)
        self._epoch, self._position = 0, 0
        self._order = self._permutation(0)

    @property
    def epoch(self) -> int:
        """Epoch of the next item, counted from 0."""
        return self._epoch

    @property
    def batches_per_epoch(self) -> float:
        """Batches until every prompt was served once; a whole number unless rows carry over."""
        whole = len(self._items) / self._batch_size
        return whole if self._carry else float(int(whole))

    def __iter__(self) -> Iterator[list[Item]]:
        return self

    def __next__(self) -> list[Item]:
        """Return this process's share of the next global batch."""
        if not self._carry and self._position + self._batch_size > len(self._items):
            self._next_epoch()
        chosen: list[int] = []
        while len(chosen) < self._batch_size:
            if self._position == len(self._items):
                self._next_epoch()
            end = self._position + self._batch_size - len(chosen)
            chosen.extend(self._order[self._position : end].tolist())
            self._position = min(end, len(self._items))
        return [self._items[i] for i in chosen[self._mine]]

    def state(self) -> dict[str, int]:
        """Return the position, to be saved with a checkpoint."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "items": len(self._items),
            "seed": self._seed,
        }

    def restore(self, state: dict[str, int]) -> None:
        """Go on from a saved position.

        Raises:
            ValueError: the position belongs to another dataset size or seed.
        """
        for key, now in (("items", len(self._items)), ("seed", self._seed)):
            if state[key] != now:
                raise ValueError(
                    f"the saved data position has {key}={state[key]}, this run has {key}={now}, so "
                    "the order would differ; use the same data, or start a new run from the weights"
                )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._permutation(self._epoch)

    def _next_epoch(self) -> None:
        self._epoch, self._position = self._epoch + 1, 0
        self._order = self._permutation(self._epoch)

    def _permutation(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self._seed, epoch]).permutation(len(self._items))


def _encode_all(
    examples: Sequence[Example], tokenizer: tokenizers.Tokenizer, config: PromptConfig
) -> tuple[list[Prompt], int]:
    """Tokenise all examples; return those within the limit, and how many were above it."""
    prompts = [encode_prompt(example, tokenizer, config) for example in examples]
    kept = [prompt for prompt in prompts if len(prompt.ids) <= config.max_prompt_tokens]
    if len(kept) < len(prompts) and config.too_long == "error":
        first = next(p for p in prompts if len(p.ids) > config.max_prompt_tokens)
        raise ValueError(
            f"{len(prompts) - len(kept)} of {len(prompts)} prompts are above max_prompt_tokens="
            f"{config.max_prompt_tokens}, the first being row {first.example.index} with "
            f'{len(first.ids)} tokens; raise the limit, or set too_long to "skip"'
        )
    return kept, len(prompts) - len(kept)


def _read_reasoning_gym(config: PromptConfig) -> list[Example]:
    """Generate `size + eval_size` tasks; the verifier finds its entry in the metadata."""
    import reasoning_gym  # here: importing it takes seconds
    from reasoning_gym.factory import DATASETS

    if config.name not in DATASETS:
        close = _nearest(config.name, DATASETS)
        raise ValueError(f"reasoning_gym has no task {config.name!r}; did you mean one of {close}?")
    size = config.size + config.eval_size
    try:
        dataset = reasoning_gym.create_dataset(
            config.name, seed=config.seed, size=size, **config.params
        )
    except (TypeError, AssertionError) as error:
        known = [field.name for field in dataclasses.fields(DATASETS[config.name][1])]
        raise ValueError(
            f"reasoning_gym task {config.name!r} refuses params {config.params}: {error}; its "
            f"parameters are {known}"
        ) from error
    state = random.getstate()  # a few tasks draw from the global generator
    random.seed(config.seed)
    try:
        entries = [dataset[i] for i in range(size)]
    finally:
        random.setstate(state)
    return [
        Example(
            prompt=entry["question"],
            answer=entry["answer"],
            metadata={"task": config.name, "params": dict(config.params), "entry": entry},
            index=i,
        )
        for i, entry in enumerate(entries)
    ]


def _read_jsonl(path: str, config: PromptConfig) -> list[Example]:
    """Read one example a line; fields other than prompt and answer become metadata."""
    if not Path(path).is_file():
        raise ValueError(
            f"prompt file {path!r} is not there; set data.path to a file of JSON lines"
        )
    rows = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number} is not JSON: {error}") from error
            rows.append(_example(row, len(rows), f"{path}:{number}", config))
    return rows


def _read_datasets(config: PromptConfig, split: str) -> list[Example]:
    """Read a split with the datasets library, honouring the subset."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            'source = "datasets" needs the datasets library: pip install "grpo-jax[datasets]"'
        ) from error
    subsets = datasets.get_dataset_config_names(config.name)
    if config.subset is not None and config.subset not in subsets:
        raise ValueError(
            f"dataset {config.name!r} has no subset {config.subset!r}; its subsets are {subsets}"
        )
    if config.subset is None and len(subsets) > 1:
        raise ValueError(
            f"dataset {config.name!r} has several subsets; set subset to one of {subsets}"
        )
    splits = datasets.get_dataset_split_names(config.name, config.subset)
    if split not in splits:
        raise ValueError(f"dataset {config.name!r} has no split {split!r}; its splits are {splits}")
    rows: Any = datasets.load_dataset(config.name, config.subset, split=split)
    return [_example(dict(row), i, f"{config.name}[{i}]", config) for i, row in enumerate(rows)]


def _example(row: Any, index: int, where: str, config: PromptConfig) -> Example:
    """Turn one row into an example, taking `messages` where the prompt field is not there."""
    field = config.prompt_field
    if isinstance(row, dict) and field == "prompt" and field not in row:
        field = "messages"
    if not isinstance(row, dict) or field not in row:
        found = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(
            f"{where} has no field {config.prompt_field!r} (it has {found}); set prompt_field"
        )
    prompt = row[field]
    if not isinstance(prompt, str):
        if not prompt or not all(
            isinstance(m, dict) and {"role", "content"} <= set(m) for m in prompt
        ):
            raise ValueError(
                f"{where}: {field} must be text or a list of {{role, content}} messages"
            )
        prompt = tuple({"role": m["role"], "content": m["content"]} for m in prompt)
    rest = {k: v for k, v in row.items() if k not in (field, config.answer_field)}
    if not isinstance(rest.get(MASK_SAMPLE, False), bool | None):
        raise ValueError(
            f"{where}: {MASK_SAMPLE} = {rest[MASK_SAMPLE]!r} must be true or false; true keeps "
            "the completions of this row out of training"
        )
    return Example(prompt, row.get(config.answer_field), rest, index)


def _nearest(name: str, known: Any) -> list[str]:
    import difflib

    return difflib.get_close_matches(name, list(known), n=5, cutoff=0.4) or sorted(known)

"""Prompts: sources, limits in tokens, held-out rows, and an order that survives a restart."""

import json

import numpy as np
import pytest

from grpo_jax.data import prompts
from grpo_jax.data.prompts import PromptConfig, PromptStream
from grpo_jax.data.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def jsonl(path, rows, **changes):
    return PromptConfig(source="jsonl", path=write_jsonl(path / "rows.jsonl", rows), **changes)


class PerCharacter(ByteTokenizer):
    """A tokenizer with a given number of characters a token."""

    def __init__(self, characters):
        self._characters = characters

    def _raw_ids(self, text):
        return [0] * -(-len(text) // self._characters)

    def encode(self, text):
        return self._raw_ids(text)


def test_reasoning_gym_prompts_are_reproducible_and_carry_their_entry():
    config = PromptConfig(name="chain_sum", size=6, eval_size=3, seed=4)
    train, held_out = prompts.load_examples(config)
    again, _ = prompts.load_examples(config)
    assert [e.prompt for e in train] == [e.prompt for e in again]
    assert len(train) == 6 and len(held_out) == 3
    assert train[0].metadata["entry"]["answer"] == train[0].answer
    assert not {e.index for e in train} & {e.index for e in held_out}


def test_unknown_task_and_unknown_parameter_are_named():
    with pytest.raises(ValueError, match="no task 'chain_sums'; did you mean.*chain_sum"):
        prompts.load_examples(PromptConfig(name="chain_sums"))
    with pytest.raises(ValueError, match="refuses params.*its parameters are.*min_terms"):
        prompts.load_examples(PromptConfig(params={"terms": 2}))


def test_jsonl_reads_prompts_messages_and_metadata(tmp_path):
    rows = [
        {"prompt": "2+2?", "answer": "4", "level": 1},
        {"messages": [{"role": "user", "content": "3+3?"}], "answer": "6"},
        {"prompt": "\u2028 stays one row", "answer": None},
    ]
    train, held_out = prompts.load_examples(jsonl(tmp_path, rows, eval_size=0))
    assert held_out == []
    assert train[0] == prompts.Example("2+2?", "4", {"level": 1}, 0)
    assert train[1].prompt == ({"role": "user", "content": "3+3?"},)
    assert len(train) == 3


@pytest.mark.parametrize(
    "row, message",
    [
        ("{", "rows.jsonl:1 is not JSON"),
        ('{"question": "x"}', "has no field 'prompt' .it has .'question'..; set prompt_field"),
        ("[1]", "has no field 'prompt' .it has list."),
        ('{"prompt": [1]}', "must be text or a list of"),
        ('{"prompt": []}', "must be text or a list of"),
    ],
)
def test_bad_rows_are_named_with_their_line(tmp_path, row, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(row + "\n")
    with pytest.raises(ValueError, match=message):
        prompts.load_examples(PromptConfig(source="jsonl", path=str(path)))


def test_missing_and_empty_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="nowhere.jsonl' is not there"):
        prompts.load_examples(PromptConfig(source="jsonl", path="nowhere.jsonl"))
    with pytest.raises(ValueError, match="the jsonl dataset .* is empty; it needs at least one"):
        prompts.load_examples(jsonl(tmp_path, []))
    with pytest.raises(ValueError, match='"jsonl" needs path'):
        PromptConfig(source="jsonl")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"template": "no place"}, r"has no \{prompt\} in it"),
        ({"size": 0}, "size = 0 is below 1"),
        ({"eval_size": -1}, "eval_size = -1 is below 0"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens = 0 is below 1"),
    ],
)
def test_bad_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        PromptConfig(**changes)


def test_system_prompt_and_template_surround_the_prompt():
    config = PromptConfig(system_prompt="Be brief.", template="Q: {prompt} {x}")
    prompt = prompts.encode_prompt(prompts.Example("1+1"), TOKENIZER, config)
    assert prompt.text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nQ: 1+1 {x}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert TOKENIZER.decode(prompt.ids.tolist(), skip_special=False) == prompt.text
    own = prompts.Example(({"role": "system", "content": "S"}, {"role": "user", "content": "u"}))
    assert prompts.encode_prompt(own, TOKENIZER, config).text.count("system") == 1


def test_plain_text_prompts_begin_with_one_bos():
    prompt = prompts.encode_prompt(prompts.Example("ab"), TOKENIZER, PromptConfig(chat=False))
    assert prompt.ids.tolist() == [257, 97, 98]
    with pytest.raises(ValueError, match="row 0 gives a prompt of no tokens"):
        prompts.encode_prompt(prompts.Example(""), PerCharacter(5), PromptConfig(chat=False))


def test_a32_the_limit_counts_tokens_and_not_characters(tmp_path):
    five, three = PerCharacter(5), PerCharacter(3)
    five_thousand = jsonl(tmp_path, [{"prompt": "x" * 5000}], eval_size=0, max_prompt_tokens=2048)
    assert len(prompts.load_prompts(five_thousand, five).train) == 1
    rows = [{"prompt": "x" * 9000}, {"prompt": "x" * 10}]
    nine_thousand = jsonl(tmp_path, rows, eval_size=0, max_prompt_tokens=2048)
    kept = prompts.load_prompts(nine_thousand, three)
    assert [len(p.example.prompt) for p in kept.train] == [10]
    assert kept.too_long == 1


def test_a_prompt_above_the_limit_is_refused_by_config_and_never_cut(tmp_path):
    rows = [{"prompt": "short"}, {"prompt": "x" * 200}]
    skip = jsonl(tmp_path, rows, eval_size=0, max_prompt_tokens=100)
    assert prompts.load_prompts(skip, TOKENIZER).too_long == 1
    error = jsonl(tmp_path, rows, eval_size=0, max_prompt_tokens=100, too_long="error")
    with pytest.raises(ValueError, match="1 of 2 prompts are above .*=100, the first being row 1"):
        prompts.load_prompts(error, TOKENIZER)
    none = jsonl(tmp_path, rows, eval_size=0, max_prompt_tokens=3)
    with pytest.raises(ValueError, match="no training prompt is left of 2: 2 above"):
        prompts.load_prompts(none, TOKENIZER)


def test_no_training_prompt_equals_a_held_out_one(tmp_path):
    rows = [{"prompt": f"q{i % 5}"} for i in range(20)]
    sets = prompts.load_prompts(jsonl(tmp_path, rows, eval_size=2), TOKENIZER)
    held_out = {p.text for p in sets.held_out}
    assert len(sets.held_out) == 2
    assert not held_out & {p.text for p in sets.train}
    assert sets.overlapping == 18 - len(sets.train) > 0


def test_a_separate_evaluation_file_is_held_out_too(tmp_path):
    rows = [{"prompt": f"q{i}"} for i in range(4)]
    other = write_jsonl(tmp_path / "eval.jsonl", [{"prompt": "q3"}, {"prompt": "new"}])
    sets = prompts.load_prompts(jsonl(tmp_path, rows, eval_path=other, eval_size=9), TOKENIZER)
    assert sorted(p.example.prompt for p in sets.held_out) == ["new", "q3"]
    assert sorted(p.example.prompt for p in sets.train) == ["q0", "q1", "q2"]


def test_holding_out_everything_is_refused(tmp_path):
    with pytest.raises(ValueError, match="eval_size = 3 holds out all 3 rows"):
        prompts.load_examples(jsonl(tmp_path, [{"prompt": "a"}] * 3, eval_size=3))


def test_a50_completions_multiply_the_prompts_once():
    rows, groups = prompts.repeat_prompts(["a", "b"], 4)
    assert rows == ["a"] * 4 + ["b"] * 4
    assert groups.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_a40_a_stream_resumed_at_an_epochs_end_goes_on_with_the_next_epoch():
    items = list(range(16))
    first = PromptStream(items, 4, seed=1)
    epoch = [next(first) for _ in range(4)]
    resumed = PromptStream(items, 4, seed=1)
    resumed.restore(json.loads(json.dumps(first.state())))
    following = [next(resumed) for _ in range(4)]
    assert following == [next(first) for _ in range(4)]
    assert sorted(sum(epoch, [])) == sorted(sum(following, [])) == items
    assert epoch != following  # each epoch has an order of its own
    assert resumed.epoch == 1 and resumed.batches_per_epoch == 4


@pytest.mark.parametrize("remainder", ["drop", "carry"])
@pytest.mark.parametrize("stop", range(7))
def test_resumed_equals_uninterrupted_at_every_position(remainder, stop):
    items = list(range(10))
    stream = PromptStream(items, 4, seed=2, remainder=remainder)
    batches = []
    for step in range(12):
        if step == stop:
            state = stream.state()
        batches.append(next(stream))
    resumed = PromptStream(items, 4, seed=2, remainder=remainder)
    resumed.restore(state)
    assert [next(resumed) for _ in range(12 - stop)] == batches[stop:]


def test_remainders_are_dropped_or_carried_over():
    items = list(range(10))
    dropping = PromptStream(items, 4, remainder="drop")
    served = [next(dropping) for _ in range(2)]
    assert len(set(sum(served, []))) == 8 and dropping.epoch == 0
    next(dropping)
    assert dropping.epoch == 1 and dropping.batches_per_epoch == 2
    carrying = PromptStream(items, 4, remainder="carry")
    served = sum((next(carrying) for _ in range(5)), [])
    assert sorted(served) == sorted(items * 2) and carrying.batches_per_epoch == 2.5
    tiny = PromptStream([1, 2], 5, remainder="carry")
    assert len(next(tiny)) == 5


def test_processes_share_one_global_order():
    items = list(range(24))
    whole = PromptStream(items, 8, seed=3)
    parts = [PromptStream(items, 8, seed=3, process_index=i, process_count=4) for i in range(4)]
    for _ in range(4):
        assert next(whole) == sum((next(part) for part in parts), [])
        assert all(part.state() == whole.state() for part in parts)


def test_order_depends_on_the_seed_alone():
    items = list(range(50))
    assert next(PromptStream(items, 50, seed=1)) == next(PromptStream(items, 50, seed=1))
    assert next(PromptStream(items, 50, seed=1)) != next(PromptStream(items, 50, seed=2))


def test_streams_that_cannot_serve_are_refused():
    with pytest.raises(ValueError, match="has no prompts"):
        PromptStream([], 2)
    with pytest.raises(ValueError, match="3 prompts do not fill one batch of 4"):
        PromptStream([1, 2, 3], 4)
    with pytest.raises(ValueError, match="6 prompts does not divide over 4 processes"):
        PromptStream(list(range(8)), 6, process_count=4)
    stream = PromptStream([1, 2, 3], 1)
    with pytest.raises(ValueError, match="has items=3, this run has items=4"):
        PromptStream([1, 2, 3, 4], 1).restore(stream.state())
    with pytest.raises(ValueError, match="has seed=0, this run has seed=1"):
        PromptStream([1, 2, 3], 1, seed=1).restore(stream.state())


@pytest.fixture(scope="module")
def two_subsets(tmp_path_factory):
    """A dataset folder with two subsets, as a dataset card describes them."""
    pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("dataset")
    for name in ("main", "socratic"):
        rows = [{"question": f"{name} {i}", "answer": str(i)} for i in range(3)]
        write_jsonl(folder / f"{name}.jsonl", rows)
    lines = ["---", "configs:"]
    for name in ("main", "socratic"):
        lines += [f"- config_name: {name}", "  data_files:"]
        lines += ["  - split: train", f"    path: {name}.jsonl"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))
    return str(folder)


def test_a55_the_subset_is_honoured_and_an_unknown_one_lists_them(
    two_subsets, monkeypatch, tmp_path
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    base = {"source": "datasets", "name": two_subsets, "prompt_field": "question", "eval_size": 0}
    main, _ = prompts.load_examples(PromptConfig(**base, subset="main"))
    socratic, _ = prompts.load_examples(PromptConfig(**base, subset="socratic"))
    assert [e.prompt for e in main] == ["main 0", "main 1", "main 2"]
    assert [e.prompt for e in socratic] == ["socratic 0", "socratic 1", "socratic 2"]
    assert main[1].answer == "1"
    with pytest.raises(ValueError, match="no subset 'other'; its subsets are .*main.*socratic"):
        prompts.load_examples(PromptConfig(**base, subset="other"))
    with pytest.raises(ValueError, match="several subsets; set subset to one of"):
        prompts.load_examples(PromptConfig(**base))
    with pytest.raises(ValueError, match="no split 'test'; its splits are .*train"):
        prompts.load_examples(PromptConfig(**base, subset="main", split="test"))


def test_a_row_may_ask_not_to_be_trained(tmp_path):
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, [{"prompt": "a", "mask_sample": True}, {"prompt": "b"}])
    examples, _ = prompts.load_examples(PromptConfig(source="jsonl", path=str(path), eval_size=0))
    assert [e.metadata.get("mask_sample") for e in examples] == [True, None]
    write_jsonl(path, [{"prompt": "a", "mask_sample": "false"}])
    with pytest.raises(ValueError, match="rows.jsonl:1: mask_sample = 'false' must be true or"):
        prompts.load_examples(PromptConfig(source="jsonl", path=str(path), eval_size=0))


def test_ids_are_int32():
    prompt = prompts.encode_prompt(prompts.Example("a"), TOKENIZER, PromptConfig())
    assert prompt.ids.dtype == np.int32

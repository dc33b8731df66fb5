"""The real SmolLM2-135M-Instruct: the numbers of transformers, and an answer that makes sense."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models import cache, hf, lora

TEXTS = [
    "The capital of France is Paris, and 12 plus 7 makes 19. Then",
    "def f(x):\n    return x + 1\n# and so on",
]


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def model(smollm2):
    return hf.load_model(smollm2)


@pytest.mark.torch
def test_logits_equal_transformers(smollm2, tokenizer, model):
    pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what importing them says is not ours
        import torch
        from transformers import AutoModelForCausalLM

        theirs = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    batch = tokenizer(TEXTS, padding=True, padding_side="right", return_tensors="np")
    tokens, real = batch["input_ids"], batch["attention_mask"]
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    hidden = jax.jit(model.policy.hidden)(model.params, tokens, positions, real)
    found = model.policy.unembed(model.policy.head(model.params), hidden)
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens), attention_mask=torch.tensor(real)).logits.numpy()
    assert np.abs(expected).max() > 20
    # The project's target; measured 1e-4 on logits up to 39.
    np.testing.assert_allclose(np.asarray(found)[real > 0], expected[real > 0], rtol=0, atol=2e-4)


@pytest.fixture(scope="module")
def prompts(tokenizer):
    """100 random questions, the first 24 tokens of each: i32[100, 24], and which are real.

    Random tokens would not do: at a few of them float32 alone moves a logit by 1e-3, here and in
    transformers, measured against float64 (docs/log.md).
    """
    import reasoning_gym

    kinds = ("chain_sum", "letter_counting", "spell_backward", "leg_counting")
    made = [reasoning_gym.create_dataset(kind, size=25, seed=7) for kind in kinds]
    texts = [entry["question"] for dataset in made for entry in dataset]
    limits = np.random.default_rng(0).integers(8, 25, len(texts))
    rows = [row[:n] for row, n in zip(tokenizer(texts)["input_ids"], limits, strict=True)]
    tokens = np.zeros((100, 24), np.int32)
    real = np.zeros_like(tokens)
    for i, row in enumerate(rows):
        tokens[i, : len(row)], real[i, : len(row)] = row, 1
    return tokens, real


def our_logits(model, params, prompts):
    """Logits f32[real tokens, V] of a model of ours."""
    tokens, real = prompts
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    hidden = jax.jit(model.policy.hidden)(params, tokens, positions, real)[real > 0]
    return np.asarray(model.policy.unembed(model.policy.head(params), hidden))


def torch_logits(module, prompts):
    """The same of a torch module."""
    import torch

    tokens, real = (torch.tensor(x) for x in prompts)
    with torch.no_grad():
        logits = module.eval()(tokens.long(), attention_mask=real.long()).logits
    return logits.numpy()[prompts[1] > 0]


@pytest.mark.torch
def test_transformers_opens_an_export_and_gives_our_logits(smollm2, model, prompts, tmp_path):
    pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    out = tmp_path / "out"
    hf.save_model(out, model.config, model.params, companions=smollm2, max_shard_bytes=2 * 10**8)
    assert len(list(out.glob("model-*.safetensors"))) > 2
    theirs = AutoModelForCausalLM.from_pretrained(out)
    found = torch_logits(theirs, prompts)
    # The project's target.
    ours = our_logits(model, model.params, prompts)
    np.testing.assert_allclose(found, ours, rtol=0, atol=2e-4)
    chat = [{"role": "user", "content": "Hello"}]
    first, second = (AutoTokenizer.from_pretrained(folder) for folder in (smollm2, out))
    assert first.apply_chat_template(chat) == second.apply_chat_template(chat)
    assert GenerationConfig.from_pretrained(out).eos_token_id == 2


@pytest.mark.torch
def test_peft_loads_an_adapter_and_gives_the_merged_models_logits(
    smollm2, model, prompts, tmp_path
):
    pytest.importorskip("torch")
    pytest.importorskip("peft")
    config = lora.LoraConfig(rank=4, alpha=8.0)
    rng = np.random.default_rng(1)
    adapter = jax.tree.map(
        lambda x: x + 0.02 * rng.normal(size=x.shape).astype(np.float32),
        lora.init_adapter(model.params, config, jax.random.key(0)),
    )
    merged = lora.merge(model.params, adapter, config.scale)
    hf.save_model(tmp_path / "merged", model.config, merged)
    lora.save_adapter(tmp_path / "adapter", model.config, adapter, config, str(smollm2))
    ours = our_logits(model, merged, prompts)
    assert np.abs(ours - our_logits(model, model.params, prompts)).max() > 1  # it changes much
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what importing them says is not ours
        from peft import AutoPeftModelForCausalLM
        from transformers import AutoModelForCausalLM

        adapted = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    for module in (adapted, exported):
        np.testing.assert_allclose(torch_logits(module, prompts), ours, rtol=0, atol=2e-4)


def test_greedy_answer_through_the_chat_template(tokenizer, model):
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    assert text.startswith("<|im_start|>system\n") and text.endswith("<|im_start|>assistant\n")
    prompt = jnp.asarray(tokenizer(text)["input_ids"], jnp.int32)[None]
    # Stacked layers: the program of 30 unrolled ones takes much longer to compile.
    decoder, new = cache.decoder_for(model.config, unroll=False), 8

    @jax.jit
    def answer(params):
        params = decoder.prepare(params)
        length = jnp.array([prompt.shape[1]], jnp.int32)
        slots = decoder.init_cache(1, prompt.shape[1] + new)
        logits, slots = decoder.prefill(params, prompt, length, slots)

        def one(carry, i):
            logits, slots = carry
            token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            return decoder.step(params, token, length + i, slots), token[0]

        return jax.lax.scan(one, (logits, slots), jnp.arange(new))[1]

    assert tokenizer.decode(answer(model.params)) == "The capital of France is Paris.<|im_end|>"


def test_digits_stand_alone_and_text_comes_back(tokenizer):
    text = "12345 plus 6789, it's  done.\n\n"
    tokens = tokenizer(text)["input_ids"]
    assert tokenizer.decode(tokens) == text
    assert [tokenizer.decode([t]) for t in tokens[:6]] == ["1", "2", "3", "4", "5", " plus"]
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"

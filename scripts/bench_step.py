"""Time a whole GRPO step, and the memory it takes, against TRL's and Tunix's own trainers.

    python scripts/bench_step.py [--rounds 2] [--steps 3] [--sides trl tunix ours] [--rows 64]
        [--tokenizer models/SmolLM2-135M-Instruct] [--envs ~/.cache/grpo-jax-bench]

A step is 8 prompts × 8 completions, 64 + 64 tokens, sampled, decoded, rewarded, and one update, of
a random Llama (4 layers of width 256, 49,152 tokens, float32). The weights are the same on all
sides, which is checked, and so are prompts, reward, loss (token-level, clip 0.2, no reference),
AdamW at 1e-6 and its clip, temperature 1 without filters; nothing ends a completion early. All
decode the text and report the entropy. Ours is `grpo-jax train` on a config; TRL (`GRPOTrainer`)
and Tunix (`GRPOLearner`, its own sampler) live in environments that this script makes in `--envs`.

Each side is a process of its own on one pinned core with one thread, and they take turns. A time is
CPU time, children included, from the end of one step to the end of the next; the first step, which
compiles, is apart; results are medians over all turns. Memory is the peak until the end of the last
step, compilation included, of the process and its children, above what the process held once it
had imported everything and before it loaded the model. `--rows` is how many of the 64 sequences TRL
and Tunix train at one time: all, unless one asks for gradient accumulation; ours keeps its default
of 8.

The last line is one JSON object.
"""

import argparse
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time

PROMPTS, GROUP, TOKENS = 8, 8, 64  # a prompt has as many tokens as a completion
INSTALL = {"trl": ("torch==2.13.0", "trl==1.16.0"), "tunix": ("google-tunix==0.1.7",)}  # in order
PHASES: tuple[str, ...] = ("sample", "decode", "reward", "update", "rest")
SETTINGS = {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"} | {
    f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")
}
SAME = 0.01  # nats; the few updates move a log-probability by less


def letters(text: str) -> float:
    """The reward of every side: the share of characters that are letters."""
    return sum(map(str.isalpha, text)) / max(len(text), 1)


def reward(sample) -> float:
    """The same for ours, which calls it in a worker process."""
    return letters(sample.completion)


class Meter:
    """CPU time of steps and of their phases, and the peak of memory."""

    def __init__(self):
        self.steps: list[dict[str, float]] = []
        self.phases = dict.fromkeys(PHASES, 0.0)
        self._open: dict[int, list[float]] = {}  # by thread: what inner phases took
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is held
        self.held, self.last = peak_bytes(), cpu_seconds()

    def phase(self, owner, name: str, phase: str, after=lambda: None) -> None:
        """Count what `owner.name` takes, without what it calls that is counted by itself."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args, **kwargs):
            stack = self._open.setdefault(threading.get_ident(), [])
            stack.append(0.0)
            begin = cpu_seconds()
            try:
                result = function(*args, **kwargs)
                after()
                return result
            finally:
                taken = cpu_seconds() - begin
                self.phases[phase] += taken - stack.pop()
                if stack:
                    stack[-1] += taken

        setattr(owner, name, timed)

    def ends(self, owner, name: str) -> None:
        """A step ends when `owner.name` returns."""
        function = getattr(owner, name)

        def marked(*args, **kwargs):
            result = function(*args, **kwargs)
            self.mark()
            return result

        setattr(owner, name, marked)

    def mark(self) -> None:
        """End a step here."""
        now = cpu_seconds()
        self.phases["rest"] = 0.0
        self.phases["rest"] = now - self.last - sum(self.phases.values())
        self.steps.append({"step": now - self.last, "peak": peak_bytes() - self.held} | self.phases)
        self.last, self.phases = now, dict.fromkeys(PHASES, 0.0)

    def report(self, logprobs) -> None:
        """Print everything as JSON."""
        print(json.dumps({"steps": self.steps, "held": self.held, "logprobs": logprobs}))


def children() -> list[str]:
    """Process ids of all descendants."""
    found = ["self"]
    for parent in found:
        for file in pathlib.Path(f"/proc/{parent}/task").glob("*/children"):
            found += file.read_text().split()
    return found[1:]


def cpu_seconds() -> float:
    """CPU time of this process and its living descendants."""
    stats = [pathlib.Path(f"/proc/{pid}/stat").read_text() for pid in children()]
    ticks = sum(int(t) for stat in stats for t in stat.rpartition(")")[2].split()[11:13])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def peak_bytes() -> int:
    """The most that was resident, of this process and of each descendant."""
    status = [pathlib.Path(f"/proc/{pid}/status").read_text() for pid in ("self", *children())]
    return 1024 * sum(int(text.split("VmHWM:")[1].split()[0]) for text in status)


def check_lengths(lengths) -> None:
    """A side that trains on less than it should would look fast."""
    assert list(lengths) == [TOKENS] * PROMPTS * GROUP, lengths


def prompt_texts(args) -> list[str]:
    lines = pathlib.Path(args.folder, "prompts.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def ours(args) -> None:
    """`grpo-jax train` on a config, with the entropy among its metrics."""
    import jax
    import yaml

    from grpo_jax import config, run
    from grpo_jax.core import filtering, logprobs
    from grpo_jax.data.tokenizer import HFTokenizer
    from grpo_jax.models import hf
    from grpo_jax.rewards.scoring import Scorer
    from grpo_jax.sampling.engine import NativeEngine
    from grpo_jax.train import loop, reporting, rollout, step

    folder, place = pathlib.Path(args.folder), tempfile.mkdtemp(dir=args.folder)
    os.environ["GRPO_JAX_CACHE"] = f"{place}/cache"  # compile anew
    score = f"{pathlib.Path(__file__).resolve()}:reward"
    settings = {
        "run": {"dir": f"{place}/run", "steps": args.steps + 1, "export": False},
        "model": {"path": f"{folder}/model"},
        "data": {"source": "jsonl", "path": f"{folder}/prompts.jsonl", "chat": False,
                 "eval_size": 0},
        "rollout": {"prompts_per_step": PROMPTS, "completions_per_prompt": GROUP},
        "sampling": {"max_new_tokens": TOKENS},
        "reward": {"components": [{"kind": score}], "workers": 1},
        "advantage": {"use_leave_one_out_baseline": False},
        "loss_fn": {"reference_policy_kl_penalty": 0.0},
        "optimizer": {"lr": 1e-6, "weight_decay": 0.0},
        "evaluate": {"at_start": False, "at_end": False},
        "report": {"progress": False},
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    step.make_train_step = functools.partial(step.make_train_step, entropy=True)
    jax.devices()
    seen, summary = [], rollout.summary

    def checked(rollout, *rest):
        seen.append(rollout.rows.completion_lengths)
        return summary(rollout, *rest)

    rollout.summary = checked
    meter = Meter()
    meter.phase(NativeEngine, "generate", "sample")
    meter.phase(HFTokenizer, "decode_batch", "decode")
    meter.phase(Scorer, "score", "reward")
    meter.phase(loop, "_update", "update")
    meter.ends(reporting.Reporter, "step")
    status = run.train(config.load(folder / "config.yaml"), reporting.make_console(quiet=True))
    assert status == run.EXIT_OK and len(seen) == args.steps + 1
    for lengths in seen:
        check_lengths(lengths)
    model = hf.load_model(folder / "model")
    rows = jax.numpy.asarray([HFTokenizer(folder / "model").encode(prompt_texts(args)[0])])
    places, segments = jax.numpy.arange(TOKENS)[None], jax.numpy.ones_like(rows)
    scores = logprobs.token_scores(
        model.policy, model.params, rows, places, segments, filter=filtering.FilterConfig()
    )
    meter.report(scores.logprobs[0, 1:].tolist())


def trl(args) -> None:
    """TRL's trainer, with transformers' `generate`."""
    import datasets
    import torch
    import transformers
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    options = GRPOConfig(
        output_dir=tempfile.mkdtemp(dir=args.folder), max_steps=args.steps + 1, seed=0,
        per_device_train_batch_size=args.rows, num_generations=GROUP, beta=0.0,
        gradient_accumulation_steps=PROMPTS * GROUP // args.rows, max_completion_length=TOKENS,
        learning_rate=1e-6, lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0,
        temperature=1.0, loss_type="dapo", bf16=False, gradient_checkpointing=False, use_cpu=True,
        generation_kwargs={"eos_token_id": None}, logging_steps=1, save_strategy="no",
        report_to="none", disable_tqdm=True,
    )  # fmt: skip
    meter = Meter()
    tokenizer = transformers.AutoTokenizer.from_pretrained(f"{args.folder}/model")
    tokenizer.eos_token = tokenizer.pad_token  # it asks for one; below, it ends nothing
    model = transformers.AutoModelForCausalLM.from_pretrained(
        f"{args.folder}/model", dtype=torch.float32, attn_implementation="sdpa"
    )

    def rewards(completions, completion_ids, **_):
        check_lengths(map(len, completion_ids))
        return [letters(text) for text in completions]

    class Marks(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            meter.mark()

    trainer = GRPOTrainer(
        model, rewards, options, processing_class=tokenizer, callbacks=[Marks()],
        train_dataset=datasets.Dataset.from_dict({"prompt": prompt_texts(args)}),
    )  # fmt: skip
    trainer.eos_token_ids = [-1]
    meter.phase(trainer, "_generate", "sample")
    meter.phase(tokenizer, "batch_decode", "decode")
    meter.phase(trainer, "_calculate_rewards", "reward")
    meter.phase(trainer, "_prepare_inputs", "rest")
    meter.phase(trainer, "training_step", "update")
    meter.phase(torch.optim.AdamW, "step", "update")
    trainer.train()
    rows = torch.tensor([tokenizer(prompt_texts(args)[0]).input_ids])
    with torch.no_grad():
        scores = trainer.model(rows).logits.log_softmax(-1)[:, :-1]
    meter.report(scores.gather(2, rows[:, 1:, None])[0, :, 0].tolist())


def tunix(args) -> None:
    """Tunix's learner, with its own sampler."""
    import jax
    import numpy as np
    import optax
    import transformers
    from flax import nnx
    from tunix.models.llama3 import model as llama  # pyright: ignore[reportMissingImports]
    from tunix.models.llama3 import params as weights  # pyright: ignore[reportMissingImports]
    from tunix.rl import common  # pyright: ignore[reportMissingImports]
    from tunix.rl import rl_cluster as clusters  # pyright: ignore[reportMissingImports]
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner  # pyright: ignore[reportMissingImports]
    from tunix.rl.rollout.base_rollout import RolloutConfig  # pyright: ignore[reportMissingImports]
    from tunix.rl.rollout.vanilla_rollout import VanillaRollout  # pyright: ignore[reportMissingImports]

    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(1, 1), ("fsdp", "tp"))
    meter, place = Meter(), f"{args.folder}/model"
    fields = json.loads(pathlib.Path(place, "config.json").read_text())
    shape = llama.ModelConfig(
        num_layers=fields["num_hidden_layers"], vocab_size=fields["vocab_size"],
        embed_dim=fields["hidden_size"], hidden_dim=fields["intermediate_size"],
        num_heads=fields["num_attention_heads"], head_dim=fields["head_dim"],
        num_kv_heads=fields["num_key_value_heads"], norm_eps=fields["rms_norm_eps"],
        rope_theta=1_000_000, weight_tying=fields["tie_word_embeddings"],
    )  # fmt: skip
    model = weights.create_model_from_safe_tensors(place, shape, mesh, dtype=jax.numpy.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    part = args.rows // GROUP if args.rows < PROMPTS * GROUP else None
    training = clusters.RLTrainingConfig(
        actor_optimizer=optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(1e-6, weight_decay=0.0)
        ),
        eval_every_n_steps=10**9, max_steps=args.steps + 1, mini_batch_size=PROMPTS,
        rollout_micro_batch_size=PROMPTS, train_micro_batch_size=part,
    )  # fmt: skip
    sampling = RolloutConfig(
        max_tokens_to_generate=TOKENS, max_prompt_length=TOKENS, kv_cache_size=2 * TOKENS,
        temperature=1.0, top_p=1.0, eos_tokens=[-1],
    )  # fmt: skip
    roles = (clusters.Role.ACTOR, clusters.Role.REFERENCE, clusters.Role.ROLLOUT)
    settings = clusters.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh), training_config=training, rollout_config=sampling
    )
    cluster = clusters.RLCluster(actor=model, tokenizer=tokenizer, cluster_config=settings)
    learner = GRPOLearner(
        cluster,
        GRPOConfig(num_generations=GROUP, beta=0.0, epsilon=0.2, loss_agg_mode="token-mean"),
        reward_fns=lambda prompts, completions, **_: [letters(text) for text in completions],
    )
    generate = VanillaRollout.generate

    def checked(*arguments, **named):
        made = generate(*arguments, **named)
        check_lengths(map(len, made.tokens))
        return made

    VanillaRollout.generate = checked
    meter.phase(VanillaRollout, "generate", "sample")
    meter.phase(type(cluster.tokenizer), "decode", "decode")
    meter.phase(learner, "_compute_rewards", "reward")
    meter.phase(cluster, "update_actor", "update", lambda: jax.block_until_ready(nnx.state(model)))
    meter.ends(learner, "_run_global_step")
    texts = np.array(prompt_texts(args))
    learner.train([{"prompts": part} for part in texts.reshape(-1, PROMPTS)])
    rows = jax.numpy.asarray([tokenizer.encode(str(texts[0]))])
    scores = common.compute_per_token_logps(
        *nnx.split(model), prompt_tokens=rows[:, :1], completion_tokens=rows[:, 1:],
        pad_id=tokenizer.pad_token_id, eos_id=-1,
    )  # fmt: skip
    meter.report(scores[0].tolist())


def make_inputs(args) -> None:
    """Write the model that every side loads, and prompts of exactly so many tokens."""
    import jax
    import numpy as np

    from grpo_jax.data.tokenizer import HFTokenizer
    from grpo_jax.models import hf, transformer
    from grpo_jax.models.model_config import ModelConfig

    folder = pathlib.Path(args.folder)
    shape = ModelConfig(
        vocab_size=49_152, hidden_size=256, intermediate_size=1024, num_layers=4, num_heads=4,
        num_kv_heads=4, head_dim=64, rope_theta=1e6,  # Tunix's Llama reads no other theta
        bos_token_id=1, param_dtype="float32", compute_dtype="float32",
    )  # fmt: skip
    params = transformer.init_params(shape, jax.random.key(0))
    hf.save_model(folder / "model", shape, params, companions=args.tokenizer)
    for name in ("tokenizer_config", "special_tokens_map", "generation_config"):
        path = folder / "model" / f"{name}.json"
        fields = json.loads(path.read_text()) if path.is_file() else {}
        fields = {k: v for k, v in fields.items() if not k.startswith("eos_")}
        if "pad_token" in fields:
            fields["pad_token"] = fields["unk_token"]
        path.write_text(json.dumps(fields))
    tokenizer, rng = HFTokenizer(folder / "model"), np.random.default_rng(0)
    assert not tokenizer.stop_ids
    words = "the of and to in is it for".split()
    with open(folder / "prompts.jsonl", "w") as file:
        for _ in range(PROMPTS * (args.steps + 1)):
            text = tokenizer.decode([tokenizer.bos_id], False) + "The"  # Tunix begins with a BOS
            while len(tokenizer.encode(text)) < TOKENS:
                text += " " + rng.choice(words)
            assert len(tokenizer.encode(text)) == TOKENS
            file.write(json.dumps({"prompt": text}) + "\n")


def python_of(side: str, root: pathlib.Path) -> str:
    """The interpreter of a side, whose environment is made where it is missing."""
    if side == "ours":
        return sys.executable
    place, wanted = root / side, "\n".join(INSTALL[side])
    python, stamp = place / "bin" / "python", place / ".installed"
    if not stamp.is_file() or stamp.read_text() != wanted:
        print(f"installing {', '.join(INSTALL[side])} in {place}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        for package in INSTALL[side]:
            subprocess.run([python, "-m", "pip", "install", "--quiet", package], check=True)
        stamp.write_text(wanted)
    return str(python)


def table(turns: dict[str, list[dict]]) -> dict[str, float]:
    """Print medians; return the figures."""
    found = {}
    print("side   first step      " + "".join(f"{n:>9}" for n in ("step", *PHASES)) + "  peak MiB")
    for side, runs in turns.items():
        steps = [step for run in runs for step in run["steps"][1:]]
        line = {n: statistics.median(step[n] for step in steps) for n in ("step", *PHASES)}
        memory = statistics.median(run["steps"][-1]["peak"] for run in runs)
        found[side] = line["step"], memory
        first = statistics.median(run["steps"][0]["step"] for run in runs)
        cells = "".join(f"{x:9.2f}" for x in line.values())
        print(f"{side:<6}{first:11.1f}      {cells}{memory / 2**20:10.0f}", flush=True)
    mine, figures = found.get("ours"), {}
    for side in ("trl", "tunix"):
        if mine and side in found:
            figures[f"speedup_vs_{side}"] = round(found[side][0] / mine[0], 3)
    if mine and "trl" in found:
        figures["memory_fraction_of_trl"] = round(mine[1] / found["trl"][1], 3)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="of a turn, after the first")
    parser.add_argument("--sides", nargs="+", default=["trl", "tunix", "ours"])
    parser.add_argument("--tokenizer", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--envs", default="~/.cache/grpo-jax-bench")
    parser.add_argument("--rows", type=int, default=PROMPTS * GROUP)
    parser.add_argument("--side", choices=("ours", "trl", "tunix"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        return {"ours": ours, "trl": trl, "tunix": tunix}[args.side](args)
    pythons = {s: python_of(s, pathlib.Path(args.envs).expanduser()) for s in args.sides}
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[-1]})
    os.environ |= SETTINGS
    turns: dict[str, list[dict]] = {side: [] for side in args.sides}
    with tempfile.TemporaryDirectory() as args.folder:
        make_inputs(args)
        for _ in range(args.rounds):
            for side, python in pythons.items():
                command = [python, __file__, *sys.argv[1:], "--side", side, "--folder", args.folder]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                turns[side].append(json.loads(done.stdout.splitlines()[-1]))
                steps = [round(step["step"], 1) for step in turns[side][-1]["steps"]]
                print(f"{side}: steps of {steps} s", flush=True)
                both = zip(
                    turns[side][-1]["logprobs"],
                    next(iter(turns.values()))[0]["logprobs"],
                    strict=True,
                )
                assert max(abs(a - b) for a, b in both) < SAME, f"{side} has another model"
    print(json.dumps({"bench": "step", "figures": table(turns)}))


if __name__ == "__main__":
    main()

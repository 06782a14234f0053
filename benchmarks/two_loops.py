"""What dropping whole loops costs when there are only two: examples without an adapter, and noise of loss and gradient.

    python benchmarks/two_loops.py             # writes benchmarks/results/two_loops.md and .json; some twenty minutes
    python benchmarks/two_loops.py --seeds 0   # without training

The small pretrained Ouro of the package learns arithmetic problems. First, at depths 2 and 4, at one fixed adapter and one
fixed batch, gates are drawn many times: how far do loss and gradient scatter? Then the rules train at depth 2, from the same
adapter with the same data, and the loss on held-out problems is taken at unit gates.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import torch
import transformers

from loopdropout_trainer import LoopDropoutConfig, LoopDropoutSFTTrainer, use_gates
from loopdropout_trainer.data.arithmetic import arithmetic_problems
from loopdropout_trainer.gates import Draw, make_rule
from loopdropout_trainer.settings.arguments import TINY_OURO_PATH


RULES = [
    ("LoRA", "lora", None, {}),
    ("Loop Dropout, p = 0.1", "loop_dropout", 0.1, {}),
    ("Loop Dropout, p = 0.2", "loop_dropout", 0.2, {}),
    ("Loop Dropout, p = 0.3", "loop_dropout", 0.3, {}),
    ("Loop Dropout, p = 0.5", "loop_dropout", 0.5, {}),
    ("Exactly one loop", "exactly_m", None, {"m": 1}),
]
BATCH = 16


def trainer_of(rule: str, p: float | None, rule_args: dict, num_loops: int, steps: int, seed: int, folder: str):
    """Return a trainer for the arithmetic problems."""
    problems = {
        split: arithmetic_problems(split, size).map(
            lambda row: {"prompt": f"{row['question']}\n", "completion": row["answer"]},
            remove_columns=["question", "answer", "num_steps"],
        )
        for split, size in (("train", BATCH * steps), ("test", 128))
    }
    fields = {"p": p} if p is not None else {}
    args = LoopDropoutConfig(
        output_dir=folder,
        rule=rule,
        rule_args=rule_args or None,
        model_init_kwargs={"num_loops": num_loops, "dtype": "float32"},
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=64,
        learning_rate=4e-3,
        lr_scheduler_type="cosine",
        warmup_steps=0.05,
        seed=seed,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_steps=1000,
        disable_tqdm=True,
        **fields,
    )
    return LoopDropoutSFTTrainer(
        str(TINY_OURO_PATH), args, train_dataset=problems["train"], eval_dataset=problems["test"]
    )


def scatter(trainer: LoopDropoutSFTTrainer, rule_fields: tuple, num_draws: int) -> tuple[float, float, float]:
    """Return the share of examples without an active loop, the loss's deviation, and the gradient's noise over signal.

    Noise is the sum of the variances of all gradient entries over draws of the gates, signal the squared norm of the mean.
    """
    name, p, rule_args = rule_fields
    rule = make_rule(name, **({} if p is None else {"p": p}), **rule_args)
    model, num_loops = trainer.model.train(), trainer.num_loops
    batch = trainer.data_collator([trainer.train_dataset[index] for index in range(BATCH)])
    lora_parameters = [p for p in model.parameters() if p.requires_grad]
    losses, unused, total, squares = [], 0, 0, 0.0
    for step in range(num_draws):
        example_ids = [(row, 0) for row in range(BATCH)]
        gates = rule.sample(Draw(seed=0, step=step, num_steps=num_draws, example_ids=example_ids, num_loops=num_loops))
        gates = gates.expand(num_loops, BATCH)
        unused += int((gates == 0).all(dim=0).sum())
        with use_gates(model, gates):
            loss = model(**batch).loss
            gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, lora_parameters)]).double()
        losses.append(loss.item())
        total, squares = total + gradient, squares + float(gradient.square().sum())
    mean_square = float((total / num_draws).square().sum())
    variance = (squares / num_draws - mean_square) * num_draws / (num_draws - 1)
    signal = mean_square - variance / num_draws  # the mean's own noise taken off
    return unused / (num_draws * BATCH), statistics.stdev(losses), variance / signal


def held_out(fields: list, options: argparse.Namespace, folder: str) -> list[float]:
    """Train with a rule at depth 2; return the held-out loss of each seed."""
    losses = []
    for seed in range(options.seeds):
        trainer = trainer_of(*fields, 2, options.steps, seed, folder)
        trainer.train()
        losses.append(trainer.evaluate()["eval_loss"])
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--draws", type=int, default=32)
    parser.add_argument("--output", default=str(Path(__file__).parent / "results" / "two_loops.md"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, records = [], []
    with tempfile.TemporaryDirectory() as folder:
        for num_loops in (2, 4):
            fixed = trainer_of("lora", None, {}, num_loops, options.steps // 2, 0, folder)
            fixed.train()
            for label, *fields in RULES:
                unused, deviation, noise = scatter(fixed, tuple(fields), options.draws)
                losses = held_out(fields, options, folder) if num_loops == 2 and options.seeds > 1 else []
                trained = f"{statistics.mean(losses):.3f} ± {statistics.stdev(losses):.3f}" if losses else "-"
                records.append(
                    {
                        "num_loops": num_loops,
                        "rule": label,
                        "examples_without_active_loop": unused,
                        "loss_deviation": deviation,
                        "gradient_noise_over_signal": noise,
                        "held_out_losses": losses,
                    }
                )
                rows.append(
                    f"| {num_loops} | {label} | {100 * unused:.1f}% | {deviation:.3f} | {noise:.2f} | {trained} |"
                )
                print(rows[-1], flush=True)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    trained = f"at unit gates after {options.steps} steps; mean and deviation of {options.seeds} seeds"
    text = f"""# Loop Dropout with two loops

`python benchmarks/two_loops.py --steps {options.steps} --draws {options.draws}` on a CPU, float32;
{versions}. The package's small Ouro, pretrained at four loops, on
arithmetic problems in batches of {BATCH}.

Scatter is over {options.draws} draws of the gates, at one fixed adapter (LoRA, {options.steps // 2} steps) and one batch.
Noise over signal: the gradient's summed variance over its squared mean, itself an estimate from so many draws.
Held-out loss: {trained if options.seeds > 1 else "not measured"}.
These are a toy's numbers: they say how noise grows, not which p is best for a model of 3B.

| Loops | Rule | Examples without an active loop | Deviation of the loss | Gradient: noise over signal | Held-out loss |
|---:|---|---:|---:|---:|---:|
""" + "\n".join(rows)
    output = Path(options.output)
    output.write_text(f"{text}\n", encoding="utf-8")
    facts = {**vars(options), "device": "cpu", "torch": torch.__version__, "transformers": transformers.__version__}
    del facts["output"]
    output.with_suffix(".json").write_text(json.dumps({**facts, "rows": records}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

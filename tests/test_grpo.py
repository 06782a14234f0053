"""`LoopDropoutGRPOTrainer` against GRPO computed directly from the model: who has which gates, and which loops get credit."""

import copy

import conftest
import pytest
import torch
from conftest import Recording, assert_same_weights, tiny_hrm, tiny_ouro, trained_parameters
from datasets import Dataset
from peft import PeftModel
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration

from loopdropout_trainer import LoopDropoutGRPOConfig, LoopDropoutGRPOTrainer, use_gates
from loopdropout_trainer.gates import Draw, LoopDropout
from loopdropout_trainer.gates.streams import Streams
from loopdropout_trainer.generation.decoding import Sampler
from loopdropout_trainer.generation.generation import sample_completions


BETA, EPSILON, TEMPERATURE, LENGTH = 0.2, 0.1, 0.8, 7
PROMPTS = Dataset.from_list([{"prompt": f"{i}+{i % 7}="} for i in range(12)])


PLAIN = {"remove_padding": False, "fused_lora": False}


def reward(completions, **columns):
    """Depends on nothing but the text, and differs between most of them."""
    return [sum(map(ord, text)) % 17 / 4 for text in completions]


@pytest.fixture
def grpo_config(config):
    def make(cls=LoopDropoutGRPOConfig, **fields):
        defaults = {
            "max_steps": 1, "per_device_train_batch_size": 6, "num_generations": 3, "max_completion_length": LENGTH,
            "temperature": TEMPERATURE, "epsilon": EPSILON, "use_cpu": True, "gradient_checkpointing": False,
        }  # fmt: skip
        return config(cls, **{**defaults, **fields})

    return make


def with_adapter(seed=1, scale=0.15):
    """A PEFT model whose adapter changes the output, and whose completions end at one token in five."""
    model = conftest.with_adapter(seed=seed, scale=scale)
    model.get_base_model().generation_config.eos_token_id = list(range(2, 54))
    return model


class Recorder(Recording, LoopDropoutGRPOTrainer):
    """Also keeps the completions of each generation."""

    sampled = ()

    def _sample(self, *args):
        completions = super()._sample(*args)
        self.sampled = [*self.sampled, completions]
        return completions


def make(args, tokenizer, model=None, cls=Recorder, reward=reward, data=PROMPTS, **more):
    model = with_adapter() if model is None else model
    return cls(model, reward, args, train_dataset=data, processing_class=tokenizer, **more)


def run(*given, resume=None, **keywords):
    trainer = make(*given, **keywords)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def set_weights(model, weights):
    for name, parameter in model.named_parameters():
        if name in weights:
            parameter.data.copy_(weights[name])
    return model


def token_log_probs(model, batch, gates=None, weights_of=None):
    """[B, C], of each completion token, from full logits of each row without padding.

    `weights_of` returns the weights of the loops' readouts, [K] or [K, S], from the base model and the readouts.
    """
    rows, base = [], model.get_base_model()
    for index in range(len(batch["prompt_ids"])):
        parts = [batch[f"{part}_ids"][index][batch[f"{part}_mask"][index].bool()] for part in ("prompt", "completion")]
        ids = torch.cat(parts)[None]
        with use_gates(model, torch.ones(model.config.num_loops) if gates is None else gates[:, index]):
            readouts = base.loop_readouts(input_ids=ids)
        weights = [0] * (len(readouts) - 1) + [1] if weights_of is None else weights_of(base, readouts)
        total = 0
        for readout, weight in zip(readouts, weights, strict=True):
            logs = (base.get_output_embeddings()(readout)[0, :-1] / TEMPERATURE).log_softmax(-1)
            total = total + weight * logs.gather(-1, ids[0, 1:, None]).squeeze(-1)
        total = total[len(parts[0]) - 1 :]
        rows.append(torch.cat([total, torch.zeros(batch["completion_ids"].shape[1] - len(parts[1]))]))
    return torch.stack(rows)


def exit_weights(base, readouts):
    """Of each loop, [S - 1]: what is left leaves with the probability of Ouro's gate; after the last loop all of it."""
    left, weights = torch.ones(readouts[0].shape[1] - 1), []
    for readout in readouts[:-1]:
        leaves = left * torch.sigmoid(base.model.early_exit_gate(readout))[0, :-1, 0].detach()
        weights.append(leaves)
        left = left - leaves
    return [*weights, left]


def advantages_of(texts, group=3):
    """As in the GRPO paper: rewards of a group, less their mean, by their standard deviation."""
    rewards = torch.tensor(reward(texts)).view(-1, group)
    scaled = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    return scaled.flatten()


def grpo_loss(new, old, reference, advantages, mask):
    """Token-level GRPO with clipping, and the k3 estimate of the KL divergence by importance, summed over all tokens."""
    ratio = (new - old).exp()
    surrogate = torch.min(ratio * advantages[:, None], ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantages[:, None])
    kl = (reference - new).exp() - (reference - new) - 1
    return ((BETA * ratio * kl - surrogate) * mask).sum() / mask.sum()


@pytest.mark.parametrize(
    ("fields", "weights"),
    [
        *((fields, None) for fields in ({}, {"gates_per": "completion"}, {"old_gates": "unit"})),
        *((fields, None) for fields in ({"reference_gates": "same"}, {"gradient_checkpointing": True}, PLAIN)),
        ({"loop_loss": "uniform"}, lambda *given: [0.25] * 4),
        (
            {"loop_loss": "progressive", "old_gates": "unit", "gates_per": "completion"},
            lambda *_: [0.1, 0.2, 0.3, 0.4],
        ),
        ({"loop_loss": "exit"}, exit_weights),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_one_step_is_grpo_of_the_gated_policy(grpo_config, tokenizer, fields, weights):
    args = grpo_config(beta=BETA, **fields)
    trainer = run(args, tokenizer)
    (seen,) = trainer.seen
    batch, gates, mask = seen.batch, seen.gates, seen.batch["completion_mask"]
    assert mask.sum(1).unique().numel() > 1, "completions of several lengths"

    # Gates: drawn for each prompt or completion, whatever their order in the batch.
    group = 1 if args.gates_per == "completion" else 3
    ids = [(row // group * group, 0) for row in batch["rows"].tolist()]
    want = LoopDropout(0.5).sample(Draw(seed=args.seed, step=0, example_ids=ids, num_loops=4))
    assert torch.equal(gates, want) and len(want.T.unique(dim=0)) == 6 // group

    # Advantages: of the texts, in the order of the generation batch.
    order, rows = batch["rows"].argsort(), zip(batch["completion_ids"], mask, strict=True)
    texts = [tokenizer.decode(ids[kept.bool()], skip_special_tokens=True) for ids, kept in rows]
    expected = torch.empty(6)
    expected[order] = advantages_of([texts[index] for index in order])
    torch.testing.assert_close(batch["advantages"], expected, rtol=1e-4, atol=1e-5)

    oracle, frozen = with_adapter(), with_adapter()
    new = token_log_probs(oracle, batch, gates, weights)
    with torch.no_grad():
        old = new.detach() if args.old_gates == "same" else token_log_probs(frozen, batch, None, weights)
        reference = token_log_probs(frozen, batch, gates if args.reference_gates == "same" else None, weights)
    loss = grpo_loss(new, old, reference, expected, mask)
    loss.backward()
    torch.testing.assert_close(seen.loss, loss.detach(), rtol=1e-4, atol=1e-5)
    for name, parameter in trained_parameters(oracle).items():
        most = 2e-5 * parameter.grad.abs().max().item() + 1e-7
        torch.testing.assert_close(seen.gradients[name], parameter.grad, rtol=1e-3, atol=most)
    assert trainer.loop_state.gates is None


def test_with_unit_gates_it_is_trls_trainer_bit_for_bit(grpo_config, tokenizer):
    fields = {"beta": BETA, "max_steps": 2}
    ours = run(grpo_config(rule="lora", **fields, **PLAIN), tokenizer)
    sampled = copy.deepcopy(ours.sampled)

    class Fed(GRPOTrainer):
        def _generate_single_turn(self, *args, **kwargs):
            return sampled.pop(0), None

    assert_same_weights(ours, run(grpo_config(GRPOConfig, **fields), tokenizer, cls=Fed))
    assert not sampled and any(gradient.any() for gradient in ours.seen[1].gradients.values())


@pytest.mark.parametrize("old_gates", ["same", "unit"])
def test_completions_keep_their_gates_and_old_log_probabilities_for_all_their_uses(grpo_config, tokenizer, old_gates):
    uses = {"max_steps": 4, "num_iterations": 2, "steps_per_generation": 2, "per_device_train_batch_size": 3}
    args = grpo_config(**uses, old_gates=old_gates)
    assert (args.generation_batch_size, args.generates_every) == (6, 4)
    seen = run(args, tokenizer).seen
    assert [each.step for each in seen] == [0, 1, 2, 3]
    drawn = {}
    for each in seen:
        for row, column in zip(each.batch["rows"].tolist(), each.gates.T.tolist(), strict=True):
            assert drawn.setdefault(row, column) == column
        with torch.no_grad():  # by the weights with which they were sampled
            gates = each.gates if old_gates == "same" else None
            old = token_log_probs(set_weights(with_adapter(), seen[0].weights), each.batch, gates)
        kept = each.batch["old_per_token_logps"] * each.batch["completion_mask"]
        torch.testing.assert_close(kept, old, rtol=1e-4, atol=1e-4)
    assert len(drawn) == 6
    new = token_log_probs(set_weights(with_adapter(), seen[0].weights), seen[0].batch, seen[0].gates)
    ratio = (new - seen[0].batch["old_per_token_logps"] * seen[0].batch["completion_mask"]).exp()
    assert torch.allclose(ratio, torch.ones_like(ratio), atol=1e-4) == (old_gates == "same")


# Completions


def warped(logits, temperature, top_k, top_p, min_p):
    """Probabilities [V], written down from the definitions."""
    p = (logits.double() / temperature).softmax(-1)
    order = p.argsort(descending=True)
    keep = torch.zeros_like(p, dtype=torch.bool)
    keep[order[: top_k or len(p)]] = True
    p = torch.where(keep, p, 0) / p[keep].sum()
    order = p.argsort(descending=True)
    before = p[order].cumsum(-1) - p[order]
    p[order[before >= top_p]] = 0
    p = p / p.sum()
    p[p < (min_p or 0) * p.max()] = 0
    return p / p.sum()


@pytest.mark.parametrize(
    "cut",
    [(1.0, 0, 1.0, None), (0.7, 0, 1.0, None), (1.3, 20, 1.0, None), (1.0, 0, 0.6, None), (0.9, 40, 0.8, 0.3)],
    ids=str,
)
def test_sampled_tokens_are_those_of_one_row_at_a_time_without_a_cache(cut, tokenizer):
    model, stops = with_adapter(scale=0.4).train(), [0, 40, 41]
    prompts = [[5, 6, 7, 8], [9, 10], [11] * 7, [12, 13, 14], [15]]
    streams = Streams(3, 5, [(row, 0) for row in range(20, 25)])
    sampler = Sampler(streams.uniforms("completions, train", 8), *cut)
    got = sample_completions(model, prompts, sampler, 8, stops, num_slots=2)
    assert model.training and got == sample_completions(model, prompts, sampler, 8, stops, num_slots=5)
    model.eval()
    for index, prompt in enumerate(prompts):
        answer = []
        for u in Streams(3, 5, [(20 + index, 0)]).uniforms("completions, train", 8)[0]:
            with torch.no_grad():
                p = warped(model(torch.tensor([prompt + answer])).logits[0, -1], *cut)
            answer.append(int((p.cumsum(-1) <= u).sum()))
            if answer[-1] in stops:
                break
        assert got[index] == answer


def test_a_split_changes_neither_completions_nor_gates_nor_weights(grpo_config, tokenizer):
    runs = []
    for batch, accumulation, slots in ((6, 1, None), (2, 3, 4)):
        split = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
        trainer = run(grpo_config(max_steps=2, completion_slots=slots, adam_epsilon=1e-3, **split), tokenizer)
        by_row = {}
        for each in trainer.seen:
            tensors = (each.batch[name] for name in ("rows", "completion_ids", "completion_mask", "advantages"))
            for (row, ids, mask, advantage), gates in zip(zip(*tensors, strict=True), each.gates.T, strict=True):
                by_row[each.step, int(row)] = (ids[mask.bool()].tolist(), round(float(advantage), 4), gates.tolist())
        runs.append((by_row, trainer))
    (one, whole), (other, split) = runs
    assert len(one) == 12 and len({tuple(completion) for completion, *_ in one.values()}) > 10
    assert one == other
    assert_same_weights(split, whole, rtol=2e-4, atol=2e-5)


def test_trls_generation_stays_usable(grpo_config, tokenizer):
    trainer = run(grpo_config(completion_decoding="generate", max_steps=2), tokenizer)
    assert all(each.gates is not None for each in trainer.seen) and not trainer.sampled
    assert make(grpo_config(repetition_penalty=1.1), tokenizer)._decoding == "generate"


def test_what_vllm_is_sent_is_the_merged_adapter_at_unit_gates(grpo_config, tokenizer):
    """Everything of TRL's synchronisation but the server: the walk over the weights, during a training step."""
    sent = []

    class Synchronising(Recorder):
        def _generate_single_turn(self, *args, **kwargs):
            vllm = object.__new__(VLLMGeneration)  # its constructor asks for vLLM
            vllm.model, vllm.accelerator, vllm._dist = self.model, self.accelerator, self._dist
            now = {n: p.detach().clone() for n, p in self.model.named_parameters() if p.requires_grad}
            sent.append((now, {name: weight.clone() for name, weight in vllm._iter_named_params()}))
            return super()._generate_single_turn(*args, **kwargs)

    run(grpo_config(max_steps=2), tokenizer, cls=Synchronising)
    assert len(sent) == 2
    for weights, got in sent:
        merged = set_weights(with_adapter(), weights).merge_and_unload().state_dict()
        tied = {name: tensor for name, tensor in merged.items() if name in got}
        assert set(got) == set(dict(tiny_ouro().named_parameters()))
        for name, tensor in tied.items():
            torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-6)


# Runs


def test_a_resumed_run_ends_with_the_same_bits(grpo_config, tokenizer, tmp_path):
    """In the middle of the completions' uses and of what is logged together, and in an epoch other than the first."""
    uses = {"num_iterations": 2, "steps_per_generation": 2}
    args = lambda: grpo_config(**uses, max_steps=7, save_strategy="steps", save_steps=1, logging_steps=2)
    timeless = lambda trainer: [
        {key: value for key, value in entry.items() if "time" not in key and "second" not in key}
        for entry in trainer.state.log_history[:-1]
    ]
    data = PROMPTS.select(range(6))  # an epoch is one generation of 4 prompts, used for 4 steps
    whole = run(args(), tokenizer, data=data)
    for step in (3, 5):
        resumed = run(args(), tokenizer, data=data, resume=f"{whole.args.output_dir}/checkpoint-{step}")
        assert [each.step for each in resumed.seen] == list(range(step, 7))
        assert_same_weights(resumed, whole)
        assert timeless(resumed) == timeless(whole)


def test_rules_with_several_passes_sample_once(grpo_config, tokenizer):
    trainer = run(grpo_config(max_steps=3, rule="lora_dropout", rule_args={"num_masks": 2}, p=0.3), tokenizer)
    assert (len(trainer.sampled), len(trainer.seen)) == (3, 6)
    logs = [log["num_tokens"] for log in trainer.state.log_history if "loss" in log]
    assert logs[-1] == trainer.state.num_input_tokens_seen


def test_evaluation_is_at_unit_gates_and_draws_alike_each_time(grpo_config, tokenizer):
    args = grpo_config(num_generations_eval=2, per_device_eval_batch_size=4, max_steps=2, learning_rate=0.0)
    trainer = make(args, tokenizer, eval_dataset=PROMPTS.select(range(4)))
    first = trainer.evaluate()
    trainer.train()
    again = trainer.evaluate()
    assert first["eval_reward"] == again["eval_reward"]
    assert [each.gates is None for each in trainer.seen] == [True, True, False, False, True, True]


def test_plain_arguments_get_the_papers_rule_and_wrong_ones_are_refused(grpo_config, tokenizer, config):
    trainer = make(grpo_config(GRPOConfig, beta=0.0), tokenizer, tiny_ouro())
    assert isinstance(trainer.model, PeftModel) and isinstance(trainer.args, LoopDropoutGRPOConfig)
    assert (trainer.rule, trainer.args.generation_batch_size) == (LoopDropout(0.5), 6)
    two_weights = {"loop_loss": "weighted", "loop_loss_args": {"loop_weights": [1, 2]}}
    texts = Dataset.from_list([{"text": "a"}])
    for fields, given, message in (
        ({"loop_loss": "random"}, {}, "`loop_loss: random` runs fewer loops"),
        (two_weights, {}, "`loop_weights` has 2 values"),
        ({"rule": "adaptive", "num_iterations": 2}, {}, "'adaptive' changes .* `old_gates: unit`"),
        ({"use_vllm": True, "loop_loss": "uniform"}, {}, "`vllm_importance_sampling_correction` compares"),
        ({}, {"model": tiny_hrm()}, "reads its prompts in both directions"),
        (None, {}, "LoopDropoutGRPOConfig or GRPOConfig; got LoopDropoutConfig"),
        ({}, {"data": texts}, "has the columns 'text'; it needs 'prompt'"),
    ):
        with pytest.raises(ValueError, match=message):
            make(config() if fields is None else grpo_config(**fields), tokenizer, **given)

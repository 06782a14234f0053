"""Measure the paper's diagnostics: single-loop activation, readouts, depths, and tests and parts of a gain in accuracy.

Each function returns results as `write_results` takes them. A batch holds model inputs with `labels` [B, S], which are
-100 where there is no target. With several processes, call a function in all of them with all batches: each process scores a
share, and all return the same results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object, send_to_device
from peft import PeftModel
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from loopdropout_trainer.data import label_example, remove_calculations
from loopdropout_trainer.errors import UserError, short_repr
from loopdropout_trainer.gate_labels import find_gates_of_block, label_gates
from loopdropout_trainer.looped import (
    LoopedModelMixin,
    attach_looped_model,
    check_num_loops,
    find_looped_model,
    use_depth,
)
from loopdropout_trainer.lora import check_enabled, is_enabled, kind_of, use_gates
from loopdropout_trainer.renames import renamed_function
from loopdropout_trainer.results.problems import digest_examples
from loopdropout_trainer.results.run_files import BASE_MODEL
from loopdropout_trainer.terminal import format_fixed
from loopdropout_trainer.tokenizers import check_tokenizer


if TYPE_CHECKING:
    from lm_eval.api.task import Task

Batch = Mapping[str, Tensor]
Result = dict[str, Any]


class Score(NamedTuple):
    """Means over the target tokens.

    Attributes:
        loss: Cross entropy in nats.
        accuracy: How often the target is the most probable token, in percent.
        n: Number of target tokens.
    """

    loss: float
    accuracy: float
    n: int


def reference_examples(task: Task, num_examples: int | None = 500) -> list[dict[str, str]]:
    """Return the prompts of a task with their reference solutions, as examples with `prompt` and `completion`.

    Args:
        task: Task of lm-eval whose problems have a text column `solution` or `answer`, or a text as the target.
        num_examples: Maximum number of examples. The default is the paper's. None: all.
    """
    problems = list(islice(getattr(task, "eval_docs", ()), num_examples))
    solutions = [problem.get("solution", problem.get("answer")) for problem in problems]
    if problems and solutions[0] is None:  # as in `own_benchmarks` with a target of other columns
        solutions = [task.doc_to_target(problem) for problem in problems]
        if isinstance(solutions[0], str):
            solutions = [solution.strip() for solution in solutions]
    if not problems or not isinstance(solutions[0], str):
        raise UserError("The diagnosed task must have a text column `solution` or `answer`, or a text as the target.")
    examples = []
    for problem, solution in zip(problems, solutions, strict=True):
        completion = f" {remove_calculations(solution)}"
        examples.append({"prompt": task.doc_to_text(problem), "completion": completion})
    return examples


def label_batches(
    examples: Iterable[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int = 8,
    completion_only_loss: bool | None = None,
    assistant_only_loss: bool = False,
) -> list[Batch]:
    """Return examples as batches with labels, padded on the right, as the trainer sees them.

    Args:
        examples: Examples in one of TRL's formats.
        tokenizer: Tokenizer with the chat template of the training.
        batch_size: Number of examples in a batch.
        completion_only_loss, assistant_only_loss: As in `SFTConfig`.
    """
    check_tokenizer(tokenizer, "tokenizer")
    if isinstance(examples, str | Mapping) or hasattr(
        examples, "to_records"
    ):  # which would give the names of its columns
        raise UserError(
            f"`examples` must be a list of mappings or a `Dataset`, got a {type(examples).__name__}. Convert a DataFrame by "
            "`datasets.Dataset.from_pandas`, and choose one split of a `DatasetDict`."
        )
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise UserError(f"`batch_size` must be an integer of at least 1, got {short_repr(batch_size)}.")
    labeled = [label_example(row, tokenizer, completion_only_loss, assistant_only_loss) for row in examples]
    collate = DataCollatorForLanguageModeling(tokenizer.pad_token_id)
    return [collate(labeled[start : start + batch_size]) for start in range(0, len(labeled), batch_size)]


def single_loop(model: PeftModel, batches: Iterable[Batch]) -> list[Result]:
    """Measure the final loop's loss with the adapter in one loop only (Appendix "Single-Loop Activation").

    The loss reduction of loop t is rho_t = 100 (CE(0) - CE(e_t)) / CE(0), where e_t activates loop t only. It takes K + 2
    forward passes.

    Args:
        model: PEFT model over a looped model.
        batches: Model inputs with labels.

    Returns:
        The `loss` of the frozen model with gates "none" and the method "base model", and `loss` and `loss_reduction` with
        gates "loop t" and "unit". They have the method of the training, if the model knows it.
    """
    check_enabled(model, "each loop would be that of the base model")
    batches = list(batches)
    num_loops = find_looped_model(model).num_loops
    frozen = score(model, batches, torch.zeros(num_loops))
    results = [_result("loss", frozen.loss, "nats", frozen.n, num_loops, "none") | {"method": BASE_MODEL}]
    columns = [{"gates": f"loop {loop}", "loop": loop} for loop in range(1, num_loops + 1)]
    columns.append({"gates": "unit"})
    for place, gates in zip(columns, [*torch.eye(num_loops), torch.ones(num_loops)], strict=True):
        adapted = score(model, batches, gates)
        reduction = 100 * (frozen.loss - adapted.loss) / frozen.loss
        results.append(_result("loss", adapted.loss, "nats", adapted.n, num_loops, **place))
        results.append(_result("loss_reduction", reduction, "%", adapted.n, num_loops, **place))
    return _complete(model, results, batches)


def readouts(model: nn.Module, batches: Iterable[Batch]) -> list[Result]:
    """Measure each loop's readout along the fully adapted recurrence (Table "MATH-500 readouts"), in one forward pass.

    Args:
        model: Looped model, with or without an adapter.
        batches: Model inputs with labels.

    Returns:
        `readout_loss` and `readout_token_accuracy` of each loop. `gates` are those of a block of `use_gates` around it.
    """
    batches = list(batches)
    num_loops = find_looped_model(model).num_loops
    gates, results = label_gates(model, num_loops), []
    for loop, readout in enumerate(score_readouts(model, batches), start=1):
        results += _loss_and_accuracy("readout", readout, num_loops, gates, loop=loop)
    return _complete(model, results, batches)


def depth_matrix(model: nn.Module, batches: Iterable[Batch], depths: Sequence[int] | None = None) -> list[Result]:
    """Measure the loss at other depths than in training (Appendix "Depth"), in one forward pass at the largest depth.

    The results of models that were trained at several depths form a matrix of training depth by evaluation depth.

    Args:
        model: Looped model, with or without an adapter.
        batches: Model inputs with labels.
        depths: Numbers of loops. Default: 1 to 2K, and 1 to K under gates [K]. An adapter with parameters of its own for each
            loop runs at K only.

    Returns:
        `depth_loss` and `depth_token_accuracy` with `num_loops` of each depth. `gates` are those of a block of `use_gates`
        around it, one for each loop of the largest depth.
    """
    num_loops = find_looped_model(model).num_loops
    if depths is None:
        gates = find_looped_model(model).gate_state.gates  # of a block, which may have no more loops
        largest = 2 * num_loops if gates is None else len(gates)
        depths = range(1, largest + 1)
    if not isinstance(depths, Sequence) or isinstance(depths, str) or not depths:
        raise UserError(f"`depths` must be a list of numbers of loops, such as [2, 4], got {short_repr(depths)}.")
    for depth in depths:
        check_num_loops(depth, "depths")
    if isinstance(model, PeftModel) and kind_of(model, model.active_adapters[0]).one_depth:
        depths = [num_loops]
    batches = list(batches)
    gates_of_block = find_gates_of_block(model, max(depths))
    labels = {depth: label_gates(model, depth, gates_of_block) for depth in depths}
    with use_depth(model, max(depths)):
        scores = score_readouts(model, batches)  # the readout of loop t is the output of a run with t loops
    results = []
    for depth in depths:
        results += _loss_and_accuracy("depth", scores[depth - 1], depth, labels[depth])
    return _complete(model, results, batches)


@torch.no_grad()
def curvature(model: PeftModel, batches: Iterable[Batch], p: float = 0.5, step: float = 2**-8) -> list[Result]:
    """Measure the curvature term of Eq. 7, (p / 2q) sum_t v_t' H v_t, which Loop Dropout adds to the loss to second order.

    v_t is the derivative of the logits by the gate of loop t at unit gates, here the central difference of two forward passes.
    v' H v is the variance of v under the softmax. It takes 2 K + 1 forward passes.

    Args:
        model: PEFT model over a looped model, in float32: bfloat16 rounds the differences of logits away.
        batches: Model inputs with labels.
        p: Drop probability.
        step: Distance of the gates from 1 in the difference.

    Returns:
        `curvature` of each loop, v_t' H v_t in nats per target token, and the term as `curvature_term`.
    """
    check_enabled(model, "gates would have no effect")
    batches = list(batches)
    num_loops = find_looped_model(model).num_loops
    sums, n = torch.zeros(num_loops, dtype=torch.float64), 0
    for looped, inputs, labels in _prepare(model, batches):
        is_target = labels != -100  # [B, S - 1]
        target_logits = functools.partial(_target_logits, model, looped, inputs, is_target)  # of gates [K]
        probabilities = target_logits(torch.ones(num_loops)).softmax(dim=-1)  # [n, V]
        for loop, change in enumerate(step * torch.eye(num_loops)):
            more, less = target_logits(1 + change), target_logits(1 - change)
            v = (more - less) / (2 * step)  # [n, V]
            variance = (probabilities * v**2).sum(dim=-1) - (probabilities * v).sum(dim=-1) ** 2  # [n]
            sums[loop] += variance.double().sum().cpu()
        n += int(is_target.sum())
    own_counts = torch.cat([sums, torch.tensor([float(n)], dtype=torch.float64)])
    counts = sum(gather_object([own_counts]))  # [K + 1], of all processes
    values, n = counts[:-1] / counts[-1], int(counts[-1])
    results = []
    for loop, value in enumerate(values.tolist(), start=1):
        results.append(_result("curvature", value, "nats", n, num_loops, "unit", loop=loop))
    term = p / (2 * (1 - p)) * float(values.sum())
    results.append(_result("curvature_term", term, "nats", n, num_loops, "unit"))
    return _complete(model, results, batches)


def check_curvature(diagnostics: Sequence[str], dtypes: Mapping[str, str]) -> None:
    """Raise UserError if curvature would be measured with weights that round the differences of logits away."""
    for dtype in dtypes.values():
        if "curvature" in diagnostics and dtype != "float32":
            raise UserError(
                f"`dtype` must be float32 for `curvature`, got {dtype}, which rounds the differences of logits away. "
                "Add `--dtype float32`."
            )


def describe_passes(
    diagnostics: Sequence[str], is_adapter: bool, num_loops: int | None, depths: Sequence[int] | None
) -> str:
    """Return the forward passes over the examples that some diagnostics of a model take, before it is loaded.

    Args:
        diagnostics: Names of the diagnostics, of which `single_loop` and `curvature` measure adapters only.
        is_adapter: Whether the model has an adapter.
        num_loops: Recurrence depth K of the model, or None if only the loaded model tells it.
        depths: As in `depth_matrix`.
    """
    most_loops, of_single_loop, of_curvature = "2 K", "K + 2", "2 K + 1"
    if num_loops is not None:
        most_loops, of_single_loop, of_curvature = f"{2 * num_loops}", f"{num_loops + 2}", f"{2 * num_loops + 1}"
    if depths:
        most_loops = str(max(depths))
    passes = {"readouts": "1 pass", "depth_matrix": f"1 pass of at most {most_loops} loops"}
    if is_adapter:
        passes |= {"single_loop": f"{of_single_loop} passes", "curvature": f"{of_curvature} passes"}
    return ", ".join(f"{name} {passes[name]}" for name in diagnostics if name in passes) or "nothing is measured"


def _target_logits(
    model: PeftModel, looped: LoopedModelMixin, inputs: dict[str, Any], is_target: Tensor, gates: Tensor
) -> Tensor:
    """Return the float32 logits [n, V] of the n target tokens of a batch, under gates [K]."""
    with use_gates(model, gates):
        readout = _final_readout(looped, inputs)
    return looped.get_output_embeddings()(readout[:, :-1][is_target]).float()


def describe_profile(rho: Sequence[float], num_tokens: int | None = None) -> str:
    """Describe in one sentence in which loops an adapter reduces the loss.

    It rises (falls) if it is larger (smaller) in each loop than in the loop before. The sentence is not advice, because the
    profile did not predict the gain of Loop Dropout (docs/diagnostics.md).

    Args:
        rho: Loss reductions of loops 1 to K in percent, from `single_loop`.
        num_tokens: Number of target tokens of the measurement, which the sentence names.
    """
    measured = "" if num_tokens is None else f" on {num_tokens:,} tokens"
    return f"The loss reduction{measured} {_describe_changes(np.array(rho))}."


def _describe_changes(rho: np.ndarray) -> str:
    """Return the predicate of the sentence about loss reductions [K]."""
    first, last, changes = rho[0], rho[-1], np.diff(rho)
    if len(rho) == 1:
        return "was measured in the only loop"
    if max(rho[:-1]) < 0.1 * last:
        return "is near zero in all loops but the last"
    if max(first, last) <= 1.1 * min(first, last):
        return "is similar in the first and the last loop"
    if (changes > 0).all():
        return "rises with each loop, as for LoRA in the paper"
    if (changes < 0).all():
        return "falls with each loop"
    order = "larger" if last > first else "smaller"
    return f"is {order} in the last loop than in the first, but does not change in one direction from loop to loop"


recommend_method = renamed_function("recommend_method", describe_profile)


def answer_decomposition(samples: Sequence[Mapping[str, Any]], baseline: Sequence[Mapping[str, Any]]) -> list[Result]:
    """Split a difference in accuracy by whether both models give an answer (Appendix "Answer Availability").

    Args:
        samples: Lines of a file of samples, with the columns `correct` (0 to 1) and `answered` (0 or 1).
        baseline: Lines of the model to compare with, for the same problems in the same order.

    Returns:
        `gain` in percentage points over all problems, and its parts `gain_both_answered` and `gain_missing_in_either`.
    """
    gains = _gains(samples, baseline)
    answered = np.array([sample["answered"] for sample in samples], bool)
    both = answered & np.array([sample["answered"] for sample in baseline], bool)
    parts = {"gain": gains, "gain_both_answered": gains * both, "gain_missing_in_either": gains * ~both}
    return [{"metric": name, "value": part.mean(), "unit": "points", "n": len(part)} for name, part in parts.items()]


FEWEST_PROBLEMS = 10
"""Number of problems from which on a difference has an interval and a test. Fewer say nothing."""

TOO_FEW = "too few problems"
"""What stands in place of the interval of a difference on fewer problems."""


class Comparison(NamedTuple):
    """A difference in accuracy between two models on the same problems, in percentage points.

    Attributes:
        gain: Mean difference.
        low, high: Its 95% interval over problems, without the variation over training seeds.
        p: Two-sided p-value of McNemar's exact test.
        n: Number of problems.
    """

    gain: float
    low: float
    high: float
    p: float
    n: int

    def __str__(self) -> str:
        if self.n < FEWEST_PROBLEMS:
            return f"{format_fixed(self.gain, 1, sign=True)}, {TOO_FEW}"
        return describe_gain(self.gain, self.low, self.high, self.p)


def describe_gain(gain: float, low: float, high: float, p: float, decimals: int = 1) -> str:
    """Return a difference with its 95% interval, and whether it is not significant."""
    gain_text, low_text, high_text = (format_fixed(number, decimals, sign=True) for number in (gain, low, high))
    text = f"{gain_text} [{low_text}, {high_text}]"
    return text if p < 0.05 else f"{text}, not significant"


def explain_disagreements(comparisons: Iterable[tuple[float, float, float]]) -> list[str]:
    """Return a sentence if an interval over problems excludes 0 although McNemar's exact test does not, else nothing.

    The interval approximates the distribution that the test has exactly, so it is narrower than the test's own one.

    Args:
        comparisons: Limits `low` and `high`, and p-value of each difference of `compare_answers`.
    """
    disagree = [(low > 0 or high < 0) and p >= 0.05 for low, high, p in comparisons]
    if not any(disagree):
        return []
    return [
        "McNemar's exact test alone decides what is significant. Near p = 0.05, an interval over problems can exclude 0 "
        "although the test does not."
    ]


def compare_answers(samples: Sequence[Mapping[str, Any]], baseline: Sequence[Mapping[str, Any]]) -> Comparison:
    """Test a difference in accuracy by the answers of both models to each problem.

    The interval is Student's t of the differences, with half a problem added to each cell of the table of right and wrong
    answers (Agresti and Min, 2005). The p-value is the one of McNemar's exact test.

    Args:
        samples, baseline: As in `answer_decomposition`.
    """
    gains = _gains(samples, baseline)
    # Half a problem in each of the four cells adds 2 to their number, and the two cells in which one model alone is right add
    # 2 * 0.5 * 100^2 to the sum of squares. Two problems with gains of 100 / sqrt(2) and -100 / sqrt(2) add the same.
    half = 100 * 0.5**0.5
    low, high = stats.ttest_1samp([*gains, half, -half], 0).confidence_interval()
    # Among the problems that only one model solves, each model would be right in half of them by chance.
    num_better, num_different = int((gains > 0).sum()), int((gains != 0).sum())
    p = stats.binomtest(num_better, max(1, num_different)).pvalue
    return Comparison(float(gains.mean()), float(low), float(high), float(p), n=len(gains))


def _gains(samples: Sequence[Mapping[str, Any]], baseline: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Return the differences between two models by problem, in percentage points."""
    if len(samples) != len(baseline):
        raise UserError(f"`baseline` must have {len(samples)} samples, got {len(baseline)}.")
    correct = np.array([sample["correct"] for sample in samples], float)
    others = np.array([sample["correct"] for sample in baseline], float)
    return 100 * (correct - others)


def score(model: nn.Module, batches: Iterable[Batch], gates: Sequence[float] | Tensor | str | None = None) -> Score:
    """Return the final loop's score, under gates [K], such as [1, 0, 0, 0] or "1-0-0-0", or under the current gates."""
    with use_gates(model, gates):
        (final_score,) = _score(model, batches, lambda looped, inputs: [_final_readout(looped, inputs)])
    return final_score


def score_readouts(model: nn.Module, batches: Iterable[Batch]) -> list[Score]:
    """Return the score of each loop's readout."""
    return _score(model, batches, lambda looped, inputs: looped.loop_readouts(**inputs))


def _final_readout(looped: LoopedModelMixin, inputs: dict[str, Any]) -> Tensor:
    """Return the final loop's hidden states [B, S, H], ready for the head."""
    return looped.base_model(**inputs, use_cache=False).last_hidden_state


@torch.no_grad()
def _score(
    model: nn.Module, batches: Iterable[Batch], readouts_of: Callable[[nn.Module, dict], Iterable[Tensor]]
) -> list[Score]:
    """Return the score of each readout [B, S, H] that `readouts_of` returns for a batch."""
    sums = 0  # [readouts, 3]: loss, most probable targets, targets. It stays 0 in a process without a batch.
    for looped, inputs, labels in _prepare(model, batches):
        head = looped.get_output_embeddings()
        is_target = labels != -100
        targets = labels[is_target]  # [n]
        rows = []
        for readout in readouts_of(looped, inputs):
            scored = readout[:, :-1][is_target]  # [n, H], so that the head computes no logits of other tokens
            logits = head(scored).float()  # [n, V]
            losses = F.cross_entropy(logits, targets, reduction="none").double()
            num_correct = (logits.argmax(dim=-1) == targets).sum().item()
            rows.append([losses.sum().item(), num_correct, len(targets)])
        sums += torch.tensor(rows, dtype=torch.float64)
    sums = sum(gather_object([sums]))
    if not isinstance(sums, Tensor):
        raise UserError("`batches` must have a target token, but there is no batch.")
    if not sums[0, 2]:
        raise UserError("`batches` must have a target token, but every label is -100.")
    return [Score(loss / n, 100 * correct / n, int(n)) for loss, correct, n in sums.tolist()]


def _prepare(model: nn.Module, batches: Iterable[Batch]) -> Iterator[tuple[LoopedModelMixin, dict[str, Any], Tensor]]:
    """Yield the looped model, its inputs and the shifted labels [B, S - 1] of this process's batches, in evaluation mode."""
    state = PartialState()
    looped = attach_looped_model(model)
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        for batch in islice(batches, state.process_index, None, state.num_processes):
            _check_batch(batch)
            inputs = dict(looped.complete_batch(send_to_device(dict(batch), device)))
            inputs.pop("example_ids", None)  # of the trainer's padding-free batches
            yield looped, inputs, inputs.pop("labels")[:, 1:]
    finally:
        model.train(was_training)


def _check_batch(batch: Any) -> None:
    """Raise UserError for a value that is not a batch, such as an example."""
    if not isinstance(batch, Mapping) or not {"input_ids", "labels"}.issubset(batch):
        raise UserError(
            f"`batches` must have `input_ids` and `labels`, got {short_repr(batch)}. Make batches of examples by "
            "`label_batches(examples, tokenizer)`."
        )


def _loss_and_accuracy(name: str, score: Score, num_loops: int, gates: str, **columns: int) -> list[Result]:
    return [
        _result(f"{name}_loss", score.loss, "nats", score.n, num_loops, gates, **columns),
        _result(f"{name}_token_accuracy", score.accuracy, "%", score.n, num_loops, gates, **columns),
    ]


def _complete(model: nn.Module, results: list[Result], batches: Sequence[Batch]) -> list[Result]:
    """Return results with the digest of their examples, and those of an adapter with its method, if the model knows it.

    Rows that name another method keep it.
    """
    problems = digest_examples(batches)
    results = [{**row, "problems": problems} for row in results]
    method = getattr(find_looped_model(model), "trained_with", {}).get("method")
    if method is None or not is_enabled(model):  # commands know the name of a merged model
        return results
    return [{"method": method, **row} for row in results]


def _result(metric: str, value: float, unit: str, n: int, num_loops: int, gates: str, **columns: int) -> Result:
    return {"metric": metric, "value": value, "unit": unit, "num_loops": num_loops, "gates": gates, "n": n, **columns}

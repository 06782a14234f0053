"""`evaluate`, `predict` and their loaders of the trainers, which run the model with all gates at 1 outside of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput

from loopdropout_trainer.lora import check_present
from loopdropout_trainer.renames import hide_library_warnings
from loopdropout_trainer.training.argument_checks import hint_at_arguments
from loopdropout_trainer.training.examples import hide_bars_of_few
from loopdropout_trainer.training.given_data import prepare_given
from loopdropout_trainer.training.stopping import closing_bars


class EvaluationMixin:
    """`evaluate` and `predict` of a TRL trainer. `AdapterTrainingMixin` lists its attributes."""

    _loads_prepared = False
    """Whether `evaluate` or `predict` runs, whose datasets have been prepared."""

    @hint_at_arguments
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate with all gates at 1, as transformers' Trainer does. A dataset is prepared as the training data.

        Inside a block of `use_gates` or `disable_adapter`, the metrics have its gates as `eval_gates`, and "none" for a
        disabled adapter. They are not the held-out loss of the training.
        """
        check_present(self.model)
        eval_dataset = prepare_given(self, "eval_dataset", eval_dataset)
        self._forget_drawn_gates()
        hide_bars = hide_bars_of_few({"eval_dataset": eval_dataset})  # newer releases of TRL prepare again
        with hide_library_warnings(), closing_bars(self), self._step_clock.pause(), hide_bars, self._load_prepared():
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    @hint_at_arguments
    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predict with all gates at 1, as transformers' Trainer does. A dataset is prepared as the training data.

        Inside a block of `use_gates` or `disable_adapter`, the metrics have its gates as `test_gates`.
        The predictions have the order of the examples, so these are neither shuffled nor packed.
        """
        check_present(self.model)
        test_dataset = prepare_given(self, "test_dataset", test_dataset)
        self._forget_drawn_gates()
        with hide_library_warnings(), closing_bars(self), self._load_prepared():
            return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> EvalLoopOutput:
        """Evaluate, with the means of the values that TRL's trainer records for each batch, named as the loss is.

        TRL adds them to the next log, always as `eval_...` and together with those of other passes since the last log.
        """
        self._metrics["eval"].clear()
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        for name, mean in self._mean_metrics().items():
            output.metrics[f"{metric_key_prefix}_{name}"] = mean
        self._metrics["eval"].clear()
        return output

    def _mean_metrics(self) -> dict[str, float | None]:
        """Return the means over batches of the values that TRL's trainer has recorded in an evaluation, by their names."""
        means = {}
        for name, values in self._metrics["eval"].items():
            means[name] = sum(values) / len(values) if values else None
        return means

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Return the loader of the held-out examples. A dataset that you give is prepared as the training data."""
        if not self._loads_prepared:
            eval_dataset = prepare_given(self, "eval_dataset", eval_dataset)
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """Return the loader of examples in their order, which are prepared as the training data."""
        if not self._loads_prepared:
            test_dataset = prepare_given(self, "test_dataset", test_dataset)
        return super().get_test_dataloader(test_dataset)

    @contextmanager
    def _load_prepared(self) -> Iterator[None]:
        """Let the loaders take datasets unchanged in this block, because `evaluate` and `predict` have prepared them."""
        before = self._loads_prepared
        self._loads_prepared = True
        try:
            yield
        finally:
            self._loads_prepared = before

"""lm-eval's own command line, with looped models in it; every flag of lm-eval's works.

    python -m loopdropout_trainer.lm_eval --model looped \\
        --model_args pretrained=ByteDance/Ouro-1.4B,adapter=outputs/gsm8k,num_loops=6 --tasks gsm8k --batch_size 16

lm-eval 0.4.13 does not look for models in other packages (its development version does, by the entry point
`lm_eval.models`). Over several processes: `accelerate launch -m loopdropout_trainer.lm_eval ...`.
"""

from loopdropout_trainer.errors import run_command


def main() -> None:
    from lm_eval.__main__ import cli_evaluate

    from loopdropout_trainer.evaluation import looped_lm  # noqa: F401 (registers the model)

    cli_evaluate()


if __name__ == "__main__":
    run_command(main, "python -m loopdropout_trainer.lm_eval")

"""Run lm-eval's command line with looped models.

    python -m loopdropout_trainer.lm_eval --model looped \\
        --model_args pretrained=ByteDance/Ouro-1.4B,adapter=outputs/gsm8k,num_loops=6 --tasks gsm8k --batch_size 16

lm-eval 0.4.13 does not search other packages for models. With several processes, use `accelerate launch -m`.
"""

from lm_eval.__main__ import cli_evaluate

from loopdropout_trainer.errors import run_script
from loopdropout_trainer.evaluation import looped_lm  # noqa: F401 (registers the model)


if __name__ == "__main__":
    run_script(cli_evaluate)

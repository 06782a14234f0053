"""The command `loopdropout` for `python -m loopdropout_trainer` and `accelerate launch -m loopdropout_trainer`."""

from loopdropout_trainer.cli import main


if __name__ == "__main__":
    main()

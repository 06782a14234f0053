"""The command `loopdropout` for `python -m` and, on several GPUs, `accelerate launch -m loopdropout_trainer COMMAND`."""

from loopdropout_trainer.command_line import main


if __name__ == "__main__":
    main()

"""Where metrics go besides the run directory: wandb, tensorboard, trackio, each in a file of its
own behind the protocol of protocol.py."""

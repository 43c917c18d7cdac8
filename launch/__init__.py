"""Starts processes: the local chain, Slurm submission, accelerate command lines. No torch: it runs on login nodes."""

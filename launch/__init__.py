"""Starts processes: the local chain, Slurm submission, accelerate command lines. Imports no torch: runs on login nodes."""

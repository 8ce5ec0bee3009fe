"""Jobs: arrays on Slurm, pools on this machine, and the process that trains one run."""

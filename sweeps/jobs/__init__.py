"""Jobs: arrays on Slurm, pools on this machine, and the process that trains one run.

A run is one process, `job`, which notes its start and its end in the run's file of events. On Slurm
each task of an array is such a process, or with `runs_per_gpu` a pool of them. A pool is a process
that starts a job for each of its runs, at most `workers` at once, and leaves the state of all in
`state.json`. A job that exits with code 75 wants to be queued again, one with 76 has saved and
stopped. A file `RUN.cancel` takes a run out of its pool; TERM stops a pool with its runs, and USR2
makes a job, or a task with all its jobs, save and requeue itself.
"""

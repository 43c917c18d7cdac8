# shellcheck shell=bash
# What is particular to your cluster. Copied, filled in and named in `launch.site_file` (or DSPARK_SITE), this one file is
# sourced twice: by `dspark submit` (or by you, before `sbatch`), for the SBATCH_* defaults; and by every batch script on
# its compute node, for modules and paths. Flags of sbatch and the launch.* settings go before SBATCH_* variables, these
# before the #SBATCH lines of the scripts.

# export SBATCH_PARTITION=gpu
# export SBATCH_ACCOUNT=my-project
# export SBATCH_GRES=gpu:8
# export SBATCH_TIMELIMIT=24:00:00

if [ -n "${SLURM_JOB_ID:-}" ]; then
  : # module load cuda
  # export DSPARK=/shared/venv/bin/dspark          # default: .venv/bin/dspark where sbatch was called, else from PATH
  # export DSPARK_MASTER_ADDR=10.0.0.1             # default: the job's first node, by its Slurm name
  # export NCCL_SOCKET_IFNAME=ib0
fi

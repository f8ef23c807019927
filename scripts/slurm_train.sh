#!/usr/bin/env bash
# Training on a Slurm cluster: one torchrun agent a machine, which starts one process for each GPU.
#
#     sbatch scripts/slurm_train.sh trainer/train_pretrain.py --data_path ... --batch_size 16
#
# Submit it from the repository's folder, which all machines have to see, as well as --out_dir.
#SBATCH --job-name=minimind
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=04:00:00
#SBATCH --output=out/slurm_%j.log
#SBATCH --signal=TERM@90        # 90 s before the time is up: the run saves and ends
#SBATCH --requeue               # a machine that is taken away gives the job another turn
set -euo pipefail

PYTHON="${PYTHON:-.venv/bin/python}"
# The agents meet at a port of the first machine of the job; the job's number keeps two jobs apart.
first_machine="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
port=$((20000 + SLURM_JOB_ID % 20000))

# --from_resume 1 begins anew if there is nothing to resume, so a requeued job needs no other line.
# --max_restarts: if a process dies, all are started again and go on from the last save.
exec srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-32}" "$PYTHON" -m torch.distributed.run \
    --nnodes "$SLURM_NNODES" --nproc_per_node "${SLURM_GPUS_ON_NODE:-8}" --max_restarts 3 \
    --rdzv_backend c10d --rdzv_endpoint "$first_machine:$port" --rdzv_id "$SLURM_JOB_ID" \
    "$@" --from_resume 1

#!/usr/bin/env bash
# From nothing to a model that answers, in one command:
#
#     bash scripts/quickstart.sh
#
# makes .venv, installs requirements.txt, writes the sample data, pretrains and fine-tunes the
# default 25.8M-parameter model on it (on the GPU if there is one), and scores the result on
# questions worded as it has never seen them. It writes .venv, dataset/sample_*.jsonl, their tokens
# in dataset/.cache, and out/quickstart; run again, it reuses what is there. Arguments go to both
# trainings (e.g. --dim 256).
set -euo pipefail
CDPATH="" cd -- "$(dirname "${BASH_SOURCE[0]}")/.."
for argument in "$@"; do
    case "$argument" in
    --out_dir* | --save_* | --from_* | --data_path*)
        echo "quickstart.sh: $argument: files and folders are fixed here; call" \
            "trainer/train_pretrain.py and trainer/train_full_sft.py to choose them" >&2
        exit 2
        ;;
    --max_minutes*)
        echo "quickstart.sh: $argument: a training that the clock ends would pass for done; a" \
            "shorter one is --max_steps N" >&2
        exit 2
        ;;
    esac
done
source scripts/environment.sh
use_environment requirements.txt

OUT_DIR=out/quickstart
SAMPLE=(dataset/sample_pretrain.jsonl dataset/sample_sft.jsonl dataset/sample_test.jsonl)
mkdir -p "$OUT_DIR"
if [ ! -f "${SAMPLE[0]}" ] || [ ! -f "${SAMPLE[1]}" ] || [ ! -f "${SAMPLE[2]}" ]; then
    "$PYTHON" scripts/make_sample_data.py
fi

# train STAGE FLAGS...   unless its marker file says that this was done already, from this data
train() {
    local stage="$1" marker="$OUT_DIR/$1.done" started="$OUT_DIR/$1.started" made_from resume=0
    shift
    made_from="$(cat "${SAMPLE[@]}" model/tokenizer.json | cksum) $*"
    if [ -f "$marker" ] && [ "$(cat "$marker")" = "$made_from" ]; then
        echo "$stage: done already, reused ($marker)"
        return
    fi
    rm -f "$marker" "$OUT_DIR/full_sft.done" # what follows is made anew as well
    if [ "$stage" = pretrain ]; then rm -f "$OUT_DIR/full_sft.started"; fi
    # Interrupted in the middle of the same thing? Then it goes on from the last save.
    if [ -f "$started" ] && [ "$(cat "$started")" = "$made_from" ]; then resume=1; fi
    echo "$made_from" >"$started"
    "$PYTHON" "trainer/train_$stage.py" --out_dir "$OUT_DIR" "$@" --from_resume "$resume"
    echo "$made_from" >"$marker"
}

# Small steps: on so little text the number of updates counts more than their precision.
common=(--max_seq_len 256 --batch_size 4 --accumulation_steps 1 --warmup_steps 20
    --optimizer adamw --learning_rate 1e-3 --min_lr_ratio 0 --save_interval 100)
train pretrain --data_path dataset/sample_pretrain.jsonl --epochs 2 "${common[@]}" "$@"
train full_sft --data_path dataset/sample_sft.jsonl --epochs 4 "${common[@]}" "$@"

newest=""
for weight in "$OUT_DIR"/full_sft_*.pth; do
    if [[ "$weight" != *_resume* && ("$newest" = "" || "$weight" -nt "$newest") ]]; then
        newest="$weight"
    fi
done
echo
echo "talk to it:  $PYTHON eval_model.py --interactive --weight $newest"
echo "scoring it on dataset/sample_test.jsonl ..."
"$PYTHON" eval_model.py --test dataset/sample_test.jsonl --weight "$newest"

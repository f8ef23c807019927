#!/usr/bin/env bash
# From nothing to a model that answers, in one command:
#
#     bash scripts/quickstart.sh
#
# makes .venv, installs requirements.txt, writes the sample data, pretrains and fine-tunes the
# default 25.8M-parameter model on it (on the GPU if there is one), and scores the result on
# questions worded as it has never seen them. Run again, it reuses what is there. Arguments go to
# both trainings (e.g. --dim 256); OUT_DIR=folder puts the results elsewhere than out/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
use_environment requirements.txt

OUT_DIR="${OUT_DIR:-out}"
mkdir -p "$OUT_DIR"
if [ ! -f dataset/sample_test.jsonl ]; then
    "$PYTHON" scripts/make_sample_data.py
fi

weights_sum() { cat "$OUT_DIR/$1"_*.pth 2>/dev/null | cksum; }

# train STAGE SCRIPT FLAGS...   unless it was done already. The marker file tells what the weights
# were made from and what they are; weights that it does not know are somebody's work, left alone.
train() {
    local stage="$1" script="$2" marker="$OUT_DIR/quickstart_$1.done" made_from known=""
    shift 2
    made_from="$(cat dataset/sample_*.jsonl model/tokenizer.json | cksum) $*"
    [ ! -f "$marker" ] || known="$(cat "$marker")"
    if [ "$known" = "$made_from"$'\n'"$(weights_sum "$stage")" ]; then
        echo "$stage: done already, reused ($marker)"
        return
    fi
    if compgen -G "$OUT_DIR/${stage}_*.pth" >/dev/null && [ "$known" != unfinished ] &&
        [ "${known##*$'\n'}" != "$(weights_sum "$stage")" ]; then
        echo "$OUT_DIR holds $stage weights that quickstart did not make; move them away, or" \
            "choose another folder: OUT_DIR=out/quickstart bash scripts/quickstart.sh" >&2
        exit 2
    fi
    echo unfinished >"$marker"
    "$PYTHON" "trainer/$script" --out_dir "$OUT_DIR" "$@"
    printf '%s\n%s\n' "$made_from" "$(weights_sum "$stage")" >"$marker"
}

# Small steps: on so little text the number of updates counts more than their precision.
common=(--max_seq_len 256 --batch_size 4 --accumulation_steps 1 --warmup_steps 20
    --min_lr_ratio 0 --save_interval 1000)
train pretrain train_pretrain.py --data_path dataset/sample_pretrain.jsonl \
    --epochs 2 --learning_rate 1e-3 "${common[@]}" "$@"
train full_sft train_full_sft.py --data_path dataset/sample_sft.jsonl \
    --epochs 4 --learning_rate 1e-3 "${common[@]}" "$@"

weight="$(ls -t "$OUT_DIR"/full_sft_*.pth | head -n 1)"
echo
echo "talk to it:  $PYTHON eval_model.py --interactive --weight $weight"
echo "scoring it on dataset/sample_test.jsonl ..."
"$PYTHON" eval_model.py --test dataset/sample_test.jsonl --weight "$weight"

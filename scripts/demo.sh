#!/usr/bin/env bash
# Fine-tune a real model on this machine and watch it learn. Sets up .venv and fetches the model when needed.
#   bash scripts/demo.sh                    SmolLM2-135M-Instruct, a few minutes on two cores
#   bash scripts/demo.sh gemma3-270m        Gemma 3 270M
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
model=${1:-smollm2-135m}
case $model in
    smollm2-135m | gemma3-270m) ;;
    *)
        echo "usage: bash scripts/demo.sh [smollm2-135m | gemma3-270m], got: $*" >&2
        exit 2
        ;;
esac
. scripts/venv.sh

echo "== fetching $model and questions with answers into .cache/models"
python scripts/fetch.py "$model" data
echo "== fine-tuning $model"
rm -rf "out/demo-$model/adapter" # of a demo before this one, which finetune.py would not overwrite
# Threads that wait asleep cost a fifth of the speed on idle cores, and save three quarters of it on busy ones.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
python scripts/finetune.py ".cache/models/$model" \
    --data .cache/models/data/chatterbot.train.jsonl \
    --eval .cache/models/data/chatterbot.eval.jsonl \
    --question "Who wrote Dracula?" \
    --max-tokens 256 --lr 1e-3 --out "out/demo-$model"
echo "  . .venv/bin/activate   # before any of these, once in your shell"
if [ "$model" = smollm2-135m ]; then
    echo "  bash scripts/demo.sh gemma3-270m   # this demo with Gemma 3 270M"
fi

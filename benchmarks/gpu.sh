#!/bin/sh
# What has to be seen on a GPU: the laws, training, several GPUs if there are, and the evaluation.
#     sh benchmarks/gpu.sh [OUT_FOLDER]
set -e
out=${1:-gpu-checks}
kvpacket verify smollm2-135m-instruct --device cuda
python benchmarks/training.py --device cuda --rows 16
kvpacket train --out "$out/one" --device cuda --set steps=40 --set batch_rows=16 --set validate_every=10
count=$(python -c "import torch; print(torch.cuda.device_count())")
if [ "$count" -gt 1 ]; then
    accelerate launch --num_processes "$count" "$(command -v kvpacket)" train --out "$out/several" \
        --set steps=40 --set batch_rows=16 --set validate_every=10
fi
kvpacket eval --data niah biography --methods full,packet,plain,none,epic-16,cacheblend-0.15,a3-0.3,sam-kv \
    --adapter "$out/one/adapter.safetensors" --limit 50 --device cuda --out "$out/eval"

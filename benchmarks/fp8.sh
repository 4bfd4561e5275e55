#!/usr/bin/env bash
# All that fp8 has to show on a card, the most telling first: bash benchmarks/fp8.sh DIRECTORY [MODEL]
#
# Tests of the kernels and the runner, kernels beside bfloat16's, captured steps, the offline workloads; and of
# MODEL, a directory with real weights, what it costs in accuracy. A part that fails does not stop the others.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?"a directory for the results"}
model=${2:-}
. benchmarks/parts.sh

part tests $python -m pytest --confcutdir=tests/kernels -o addopts=--import-mode=importlib -p no:cacheprovider -q \
  tests/kernels/test_fp8_kernels.py tests/kernels/test_fp8_runner.py
for name in qwen3-8b qwen3-0.6b; do
  part "step-$name-bf16" $python benchmarks/decode_step.py --model $name --out "$out/step-$name-bf16.csv"
  part "step-$name-weights" $python benchmarks/decode_step.py --model $name --quantization fp8 \
    --out "$out/step-$name-weights.csv"
  part "step-$name-all" $python benchmarks/decode_step.py --model $name --quantization fp8 --kv-cache-dtype fp8 \
    --profile 1,64,256 --out "$out/step-$name-all.csv"
done
part kernels $python benchmarks/kernels.py --kinds fp8 --out "$out/kernels.csv"
if [ -n "$model" ]; then
  part accuracy $python benchmarks/quantization.py --device cuda --model "$model" --out "$out/accuracy.csv"
fi
for name in qwen3-8b qwen3-0.6b; do
  part "offline-$name" $python benchmarks/offline.py --model $name --quantization fp8 --kv-cache-dtype fp8 \
    --out "$out/offline-$name.csv"
done
exit $status

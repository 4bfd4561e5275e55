#!/usr/bin/env bash
# All that experts have to show on a card, the most telling first: bash benchmarks/experts.sh DIRECTORY
#
# Tests of the kernels and the runner, captured steps of Qwen3-30B-A3B with random weights, kernels by tile shape,
# the offline workloads. A part that fails does not stop the others.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?"a directory for the results"}
. benchmarks/parts.sh

part tests $python -m pytest --confcutdir=tests/kernels -o addopts=--import-mode=importlib -p no:cacheprovider -q \
  tests/kernels/test_expert_kernels.py tests/kernels/test_card_ops.py
part step $python benchmarks/decode_step.py --model qwen3-30b-a3b --profile 1,8,64,256 --out "$out/step.csv"
part step-fp8 $python benchmarks/decode_step.py --model qwen3-30b-a3b --quantization fp8 --kv-cache-dtype fp8 \
  --profile 1,64 --out "$out/step-fp8.csv"
part kernels $python benchmarks/kernels.py --kinds experts --out "$out/kernels.csv"
part runner-tests $python -m pytest --confcutdir=tests/kernels -o addopts=--import-mode=importlib -p no:cacheprovider -q \
  -k moe tests/kernels/test_card_runner.py tests/kernels/test_card_models.py tests/kernels/test_fp8_runner.py
LINES_SHOWN=100 part sweep $python benchmarks/kernels.py --kinds experts --sweep --out "$out/sweep.csv"
part offline $python benchmarks/offline.py --model qwen3-30b-a3b --cases decode,prefill,mixed --out "$out/offline.csv"
exit $status

#!/usr/bin/env bash
# All that decoding in 16 bits has to show on a card: bash benchmarks/decode.sh DIRECTORY [rounds]
#
# The offline workloads first, then tests and memcheck of the kernels. On an H200 some 8 minutes with three rounds.
# A part that fails does not stop the others.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?"a directory for the results"}
rounds=${2:-3}
. benchmarks/parts.sh
pytest="$python -m pytest --confcutdir=tests/kernels -o addopts=--import-mode=importlib -p no:cacheprovider -q"

part small $python benchmarks/offline.py --cases decode,asked,mixed,many,prefill --rounds "$rounds" --out "$out/small.csv"
part large $python benchmarks/offline.py --model qwen3-8b --cases decode,mixed --rounds "$rounds" --out "$out/large.csv"
part steps $python benchmarks/decode_step.py --prefill "" --profile 1,8,32 --out "$out/steps.csv"
part fp8-steps $python benchmarks/decode_step.py --model qwen3-8b --quantization fp8 --kv-cache-dtype fp8 --prefill "" \
  --out "$out/fp8-steps.csv"
part adapters $python benchmarks/decode_step.py --adapters 4 --prefill "" --out "$out/adapters.csv"
part between $python benchmarks/between_steps.py --rows 1,8,64
part tests $pytest tests/kernels
if sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2> /dev/null); then
  part memcheck "$sanitizer" --tool memcheck --target-processes all $pytest tests/kernels/test_attention_kernels.py \
    tests/kernels/test_small_linear.py tests/kernels/test_adjust_kernel.py tests/kernels/test_logprobs_kernel.py
fi
exit $status

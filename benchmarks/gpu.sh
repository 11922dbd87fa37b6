#!/usr/bin/env bash
# Everything that takes a GPU: the tests marked gpu, and the benchmarks that docs/benchmarks.md shows.
#
#   NNSIGHT_ASYNC_GPU_MODEL=folder benchmarks/gpu.sh OUT [PART ...]
#
# OUT gets a log of each part, and its results. Parts, each with a limit of its own and none needing another:
#   tests    tests/test_gpu.py on every engine
#   bench    all workloads beside plain vLLM, 1 to 128 requests in flight
#   heavy    every layer home from up to 128 requests, with short prompts
#   eager    the same without graphs, beside plain vLLM without graphs
#   peers    the other packages that are installed
#   visits   what a visit costs on this host
# PYTHON and SECONDS_EACH (440) can be set in the environment.
set -uo pipefail

out=$(realpath "${1:?where results go}")
shift
parts=${*:-tests bench heavy eager peers visits}
python=${PYTHON:-python}
seconds=${SECONDS_EACH:-440}
mkdir -p "$out"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

failed=0
# part NAME COMMAND...: run one, with its output in OUT/NAME.txt; it may take some more than it is told, to end by itself.
part() {
  local name=$1
  shift
  echo "== $name"
  # Not asked to end but killed, with its engines, which would hold the device's memory.
  timeout --signal=KILL $((seconds + 100)) "$@" >"$out/$name.txt" 2>&1 || failed=1
  tail -n 4 "$out/$name.txt"
}
bench() {
  local name=$1
  shift
  part "$name" "$python" -m benchmarks.run --budget-seconds "$seconds" --json "$out/gpu-$name.json" "$@"
}

for name in $parts; do
  case $name in
    tests) part tests "$python" -m pytest -q -m gpu tests/test_gpu.py --durations=15 ;;
    bench) bench bench --only nnsight_async --steps-by-tier ;;
    heavy) bench heavy --only nnsight_async --workloads "every layer,cache" --prompt-tokens 32 --heavy-requests 128 ;;
    eager) bench eager --only nnsight_async --eager --workloads "one layer,zeroed head" ;;
    peers) bench peers --workloads "untraced,one layer,every layer,steering,sweep" --rounds 1 ;;
    visits) part visits "$python" -m benchmarks.visits ;;
    *) echo "no part is called $name" >&2; exit 2 ;;
  esac
done
exit $failed
